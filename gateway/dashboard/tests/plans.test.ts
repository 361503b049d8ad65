import { afterEach, describe, expect, it, vi } from 'vitest';

import { GatewayError, type Gateway } from '../src/lib/api';
import { lineOf, PlanRunner, rangeOf, type PlanInfo } from '../src/lib/plans.svelte';

const RUN: PlanInfo = {
  id: 'r1',
  name: 'plan',
  seed: 0,
  user: 'ada',
  by: 'ada',
  began: 1,
  state: 'running',
  why: null,
  text: 'faults: []',
  progress: { seconds: 1, faults: [], expectations: [], injected: 0 },
  lines: [],
};

function gateway(answers: Record<string, () => unknown>): { gateway: Gateway; asked: string[] } {
  const asked: string[] = [];
  const request = async (method: string, path: string): Promise<unknown> => {
    asked.push(`${method} ${path}`);
    return answers[`${method} ${path}`]!();
  };
  return { gateway: { request } as unknown as Gateway, asked };
}

afterEach(() => vi.useRealTimers());

describe('a plan', () => {
  it('has the line that an error names', () => {
    expect(lineOf('plan:5:18: a time is not negative')).toBe(5);
    expect(lineOf('plan:0:0: sigkill: …')).toBeNull();
    expect(lineOf('the weaver is away')).toBeNull();
    expect(rangeOf('a\nbcd\ne', 2)).toEqual([2, 5]);
    expect(rangeOf('a', 9)).toEqual([0, 1]);
  });

  it('is looked at every second until it has ended', async () => {
    vi.useFakeTimers();
    let state: PlanInfo['state'] = 'running';
    const { gateway: made, asked } = gateway({
      'GET weaver/plans': () => ({ plans: [RUN] }),
      'GET weaver/plans/r1': () => ({ ...RUN, state }),
    });
    const runner = new PlanRunner(made);
    const stop = runner.watch();
    await vi.advanceTimersByTimeAsync(1000);
    expect(asked).toEqual(['GET weaver/plans', 'GET weaver/plans/r1', 'GET weaver/plans/r1']);
    state = 'held';
    await vi.advanceTimersByTimeAsync(3000);
    expect(runner.run!.state).toBe('held');
    expect(asked).toHaveLength(4);
    stop();
  });

  it('has failed if the gateway does not know it any more', async () => {
    vi.useFakeTimers();
    const { gateway: made } = gateway({
      'GET weaver/plans/r1': () => {
        throw new GatewayError(404, 'not_found', 'no such run');
      },
    });
    const runner = new PlanRunner(made);
    runner.run = RUN;
    const stop = runner.watch();
    await vi.advanceTimersByTimeAsync(10);
    expect(runner.run).toMatchObject({ state: 'failed', why: 'the gateway that carried it out has ended' });
    stop();
  });

  it('shows why it was refused', async () => {
    const { gateway: made } = gateway({
      'POST weaver/plans': () => {
        throw new GatewayError(422, 'bad_plan', 'plan:1:1: the plan is empty');
      },
    });
    const runner = new PlanRunner(made);
    await runner.begin('');
    expect(runner.error).toBe('plan:1:1: the plan is empty');
    expect(runner.busy).toBe(false);
  });
});
