/** Plans of faults: checked and carried out by the gateway, and followed while they are shown. */

import { GatewayError, type Gateway } from './api';
import { Attempt } from './attempt.svelte';
import { regularly } from './regularly';

const EVERY = 1000; // milliseconds between two looks at a run

export type PlanState = 'running' | 'held' | 'broken' | 'cancelled' | 'failed';

export interface PlanSummary {
  id: string;
  name: string;
  seed: number;
  user: string;
  by: string;
  began: number;
  state: PlanState;
  why: string | null;
}

export interface FaultProgress {
  fault: string;
  when: string;
  target: string;
  state: 'waiting' | 'present' | 'over' | 'recovered' | 'given_up' | 'not_injected';
  times: number;
  at: number | null;
  struck: string[];
  injection: string;
  detected: number | null;
  recovered: number | null;
  steps_lost: number | null;
  why: string | null;
}

export interface ExpectationProgress {
  expected: string;
  held: boolean | null;
  final: boolean;
  found: string;
  fault: number | null;
}

export interface PlanInfo extends PlanSummary {
  text: string;
  progress: { seconds: number; faults: FaultProgress[]; expectations: ExpectationProgress[]; injected: number };
  lines: { time: number; text: string }[];
}

export interface PlanChecked {
  name: string;
  faults: number;
  expectations: number;
  seed: number;
}

/** Return the line that an error of a plan names, from 1; null if it names none. */
export function lineOf(message: string): number | null {
  const match = /^plan:(\d+):\d+: /.exec(message);
  return match && Number(match[1]) > 0 ? Number(match[1]) : null;
}

/** Return where a line of a text begins and ends. */
export function rangeOf(text: string, line: number): [number, number] {
  const lines = text.split('\n');
  const at = Math.min(line, lines.length) - 1;
  const start = lines.slice(0, at).reduce((sum, one) => sum + one.length + 1, 0);
  return [start, start + lines[at]!.length];
}

/** The error says why a plan was refused. */
export class PlanRunner extends Attempt {
  run = $state.raw<PlanInfo | null>(null);
  checked = $state.raw<PlanChecked | null>(null);

  #gateway: Gateway;

  constructor(gateway: Gateway) {
    super();
    this.#gateway = gateway;
  }

  /** Look at the newest run, and at one that goes on every second, until the returned function is called. */
  watch(): () => void {
    let looking = false;
    const look = async (): Promise<void> => {
      if (looking || (this.run && this.run.state !== 'running')) return;
      looking = true;
      try {
        if (this.run) await this.#load(this.run.id);
        else await this.#latest();
      } catch (error) {
        // A gateway that was started again does not know the run any more.
        if (error instanceof GatewayError && error.status === 404 && this.run)
          this.run = { ...this.run, state: 'failed', why: 'the gateway that carried it out has ended' };
      } finally {
        looking = false;
      }
    };
    void look();
    return regularly(EVERY, () => void look());
  }

  async check(text: string): Promise<void> {
    this.checked = null;
    await this.make(async () => {
      this.checked = await this.#gateway.request<PlanChecked>('POST', 'weaver/plans/check', { text });
    });
  }

  async begin(text: string): Promise<void> {
    this.checked = null;
    await this.make(async () => {
      this.run = await this.#gateway.request<PlanInfo>('POST', 'weaver/plans', { text });
    });
  }

  async cancel(): Promise<void> {
    const { run } = this;
    if (!run) return;
    await this.make(async () => {
      this.run = await this.#gateway.request<PlanInfo>('DELETE', `weaver/plans/${run.id}`);
    });
  }

  async #latest(): Promise<void> {
    const { plans } = await this.#gateway.request<{ plans: PlanSummary[] }>('GET', 'weaver/plans');
    if (plans[0]) await this.#load(plans[0].id);
  }

  async #load(id: string): Promise<void> {
    this.run = await this.#gateway.request<PlanInfo>('GET', `weaver/plans/${id}`);
  }
}
