/** The log of commands: those of this page, with their acknowledgements, and those that events tell of. */

import { isolate } from './format';
import type { Acknowledgement, AcknowledgementMessage, Change, CommandKind, Target, WeaverEvent } from './types';

/** `sent`: nobody has answered. `accepted`: the weaver has the command. `error`: it was refused as a whole. */
export type Phase = 'sent' | 'accepted' | 'done' | 'error';

export interface CommandRun {
  id: string;
  kind: string;
  params: Record<string, unknown>;
  target: Target;
  by: string;
  time: number;
  /** Whether this page gave the command. */
  mine: boolean;
  phase: Phase;
  replicas: string[];
  /** The number of replicas that the command is for. */
  total: number;
  acknowledgements: Map<string, Acknowledgement>;
  error: string | null;
  /** Id of the event of the command; null until it came. */
  event: number | null;
  cause: number | null;
}

export interface Order {
  kind: CommandKind;
  /** Undefined: those on the devices that the parameters name. */
  target: Target | undefined;
  params: Record<string, unknown>;
}

const KEPT = 1000;
const ANSWERS: ReadonlySet<string> = new Set(['applied', 'refused', 'unanswered']);

export class CommandLog {
  readonly runs = new Map<string, CommandRun>();
  #aliases = new Map<string, string>(); // the page's ids of commands that the weaver knows by another id

  get(id: string): CommandRun | undefined {
    return this.runs.get(this.#aliases.get(id) ?? id);
  }

  /** The commands, the newest first. */
  list(): CommandRun[] {
    return [...this.runs.values()].sort((one, other) => other.time - one.time);
  }

  add(
    id: string,
    kind: string,
    target: Target,
    params: Record<string, unknown>,
    by: string,
    time: number,
    mine = true,
  ): CommandRun {
    const run: CommandRun = {
      id,
      kind,
      params,
      target,
      by,
      time,
      mine,
      phase: 'sent',
      replicas: [],
      total: 0,
      acknowledgements: new Map(),
      error: null,
      event: null,
      cause: null,
    };
    this.runs.set(id, run);
    this.#forget();
    return run;
  }

  accept(id: string, command: string | null, replicas: string[]): void {
    const run = this.get(id);
    if (!run) return;
    if (command && command !== run.id) {
      const heard = this.runs.get(command);
      this.runs.delete(run.id);
      this.#aliases.set(id, command);
      run.id = command;
      if (heard) {
        run.event = heard.event;
        for (const [replica, one] of heard.acknowledgements) run.acknowledgements.set(replica, one);
      }
      this.runs.set(command, run);
    }
    run.replicas = replicas;
    run.total = replicas.length;
    if (run.phase === 'sent') run.phase = 'accepted';
  }

  acknowledge(message: AcknowledgementMessage, time: number): void {
    const run = this.get(message.id);
    if (!run) return;
    put(run, { ...readAcknowledgement(message, run.params), time: message.waiting ? null : time });
  }

  done(id: string): void {
    const run = this.get(id);
    if (run && run.phase !== 'error') run.phase = 'done';
  }

  fail(id: string, message: string): void {
    const run = this.get(id);
    if (!run || run.phase === 'done') return;
    run.phase = 'error';
    run.error = message;
  }

  /** Take an event about a command; return whether it was one. */
  take(event: WeaverEvent): boolean {
    if (event.kind === 'policy') this.#policy(event);
    else if (event.kind === 'command') this.#given(event);
    else if (ANSWERS.has(event.kind) && event.replica !== null) this.#answered(event);
    else return false;
    return true;
  }

  #given(event: WeaverEvent): void {
    const id = String(event['command']);
    const target = event['target'] as Target;
    const run = this.runs.get(id) ?? this.add(id, String(event['do']), target, {}, '', event.time, false);
    if (run.phase === 'sent') run.phase = 'accepted';
    run.event = event.id;
    run.cause = event.cause ?? null;
    run.by = String(event['by'] ?? '');
    run.time = event.time;
    run.params = (event['params'] as Record<string, unknown> | undefined) ?? {};
    run.total = Number(event['replicas'] ?? run.total);
    settle(run);
  }

  #answered(event: WeaverEvent): void {
    const run = this.runs.get(String(event['command']));
    if (!run) return;
    put(run, {
      replica: event.replica!,
      ok: event.kind === 'applied',
      step: (event['step'] as number | null | undefined) ?? null,
      changes: (event['changes'] as Record<string, Change> | undefined) ?? {},
      refused: (event['refused'] as Record<string, string> | undefined) ?? {},
      reason: (event['reason'] as string | null | undefined) ?? null,
      waiting: false,
      evidence: (event['evidence'] as Record<string, unknown> | undefined) ?? {},
      time: event.time,
    });
  }

  #policy(event: WeaverEvent): void {
    const { group, action, by } = event as unknown as { group: string; action: string; by: string };
    const id = `policy-${event.id}`;
    if (this.runs.has(id)) return;
    const run = this.add(id, 'policy', group, { action }, by, event.time, false);
    Object.assign(run, { phase: 'done', event: event.id });
  }

  #forget(): void {
    for (const [id, run] of this.runs) {
      if (this.runs.size <= KEPT) return;
      if (run.phase !== 'sent') this.runs.delete(id);
    }
  }
}

function put(run: CommandRun, one: Acknowledgement): void {
  const before = run.acknowledgements.get(one.replica);
  if (before && !before.waiting && one.waiting) return;
  run.acknowledgements.set(one.replica, before && !before.waiting ? { ...one, time: before.time ?? one.time } : one);
  settle(run);
}

/** Commands of others have no message `done`: they are done when each replica has answered. */
function settle(run: CommandRun): void {
  if (run.mine || run.phase === 'error') return;
  const answered = [...run.acknowledgements.values()].filter((one) => !one.waiting).length;
  if (run.total > 0 && answered >= run.total) run.phase = 'done';
}

export function readAcknowledgement(message: AcknowledgementMessage, params: Record<string, unknown>): Acknowledgement {
  return {
    replica: message.replica,
    ok: message.ok,
    step: message.step ?? null,
    changes: message.changes ?? pairs(message.old, message.new, params),
    refused: message.refused ?? {},
    reason: message.reason ?? null,
    waiting: message.waiting === true,
    evidence: message.evidence ?? {},
    time: null,
  };
}

function pairs(old: unknown, fresh: unknown, params: Record<string, unknown>): Record<string, Change> {
  const keys = Object.keys(params);
  if (isRecord(fresh) && Object.keys(fresh).every((key) => key in params))
    return Object.fromEntries(
      Object.entries(fresh).map(([key, one]) => [key, { old: isRecord(old) ? (old[key] ?? null) : null, new: one }]),
    );
  if (fresh == null || keys.length !== 1) return {};
  return { [keys[0]!]: { old: old ?? null, new: fresh } };
}

function isRecord(given: unknown): given is Record<string, unknown> {
  return typeof given === 'object' && given !== null && !Array.isArray(given);
}

/** Return the commands that take a command back; none if it changed nothing whose old value is known. */
export function takeBack(run: CommandRun): Order[] {
  const applied = [...run.acknowledgements.values()].filter((one) => one.ok && !one.waiting);
  if (!applied.length) return [];
  const target = applied.map((one) => one.replica);
  // The weaver adds the devices of a group to the parameters.
  const about = 'group' in run.params ? { group: run.params['group'] } : { device: run.params['device'] };
  if (run.kind === 'pause') return [{ kind: 'resume', target, params: {} }];
  if (run.kind === 'resume') return [{ kind: 'pause', target, params: {} }];
  if (run.kind === 'deactivate_device') return [{ kind: 'reactivate', target: undefined, params: about }];
  if (run.kind === 'reactivate') return [{ kind: 'deactivate_device', target: undefined, params: about }];
  if (run.kind !== 'update_config') return [];
  const groups = new Map<string, Order & { target: string[] }>();
  for (const one of applied) {
    const known = Object.entries(one.changes).filter(([, change]) => change.old !== null && change.old !== undefined);
    if (!known.length) continue;
    const old = Object.fromEntries(known.map(([key, change]) => [key, change.old]));
    const key = JSON.stringify(old);
    const group = groups.get(key) ?? { kind: 'update_config' as const, target: [], params: old };
    group.target.push(one.replica);
    groups.set(key, group);
  }
  return [...groups.values()];
}

/** Return a sentence of what a command does, without its target. */
export function describeCommand(kind: string, params: Record<string, unknown>): string {
  const device = isolate(String(params['device'] ?? params['group'] ?? 'a device'));
  switch (kind) {
    case 'update_config':
      return Object.entries(params)
        .map(([key, one]) => isolate(`${key} = ${typeof one === 'string' ? one : JSON.stringify(one)}`))
        .join(', ');
    case 'deactivate_device':
      return `deactivate ${device}`;
    case 'reactivate':
      return `reactivate ${device}`;
    case 'device_failed':
      return `notify of a failure of ${device}`;
    case 'inject':
      return `inject ${String(params['fault'] ?? 'a fault')}`;
    case 'remove_fault':
      return 'remove a fault';
    case 'policy':
      return `on a device's failure: ${String(params['action'])}`;
    default:
      return kind;
  }
}
