/** The axes of a plot. */

import { describe, expect, it, vi } from 'vitest';

import { clock } from '../src/lib/format';
import { rangeOfValues, ticksOf, valueTicks, type Tick } from '../src/lib/ticks';

const texts = (ticks: readonly Tick[]): string[] => ticks.map((one) => one.text);
const places = (ticks: readonly Tick[]): number[] => ticks.map((one) => Number(one.at.toPrecision(12)));

describe('the ticks below a plot', () => {
  it('are round steps, and whole ones', () => {
    expect(texts(ticksOf('step', [3, 2100], 400))).toEqual(['500', '1,000', '1,500', '2,000']);
    expect(texts(ticksOf('samples', [0, 4e6], 400))).toEqual(['0', '1M', '2M', '3M', '4M']);
    expect(places(ticksOf('step', [7, 9], 4000))).toEqual([7, 8, 9]);
  });

  it('are round durations since a run began', () => {
    expect(texts(ticksOf('elapsed', [0, 7200], 400))).toEqual(['0 s', '30 min', '1 h', '1 h 30 min', '2 h']);
  });

  it('are round times of the day, and midnights of long times', () => {
    const noon = new Date(2026, 2, 10, 12).getTime() / 1000;
    expect(texts(ticksOf('time', [noon - 60, noon + 3600], 240))).toEqual(['12:00', '12:30', '13:00']);
    expect(texts(ticksOf('time', [noon - 1, noon + 11], 240))).toEqual([noon, noon + 5, noon + 10].map(clock));
    const midnights = ticksOf('time', [noon - 60 * 86400, noon + 60 * 86400], 800);
    expect(midnights.length).toBeGreaterThan(5);
    expect(midnights.map(({ at }) => new Date(at * 1000).getHours())).toEqual(midnights.map(() => 0));
  });

  it('are found without looking at every second of the days around', () => {
    const asked = vi.spyOn(Date.prototype, 'getTimezoneOffset');
    ticksOf('time', [1e9, 1e9 + 11], 240);
    ticksOf('time', [1e9, 1e9 + 7200], 240);
    expect(asked.mock.calls.length).toBeLessThan(200);
    vi.restoreAllMocks();
  });

  it('are some at most, however long the axis is', () => {
    for (const span of [1, 100, 1e5, 1e7, 1e9])
      for (const axis of ['step', 'samples', 'time', 'elapsed'] as const) expect(ticksOf(axis, [1e9, 1e9 + span], 800).length).toBeLessThanOrEqual(12);
  });
});

describe('the ticks beside a plot', () => {
  it('are round values', () => {
    expect(texts(valueTicks([0, 1], false, 140))).toEqual(['0', '0.2', '0.4', '0.6', '0.8', '1']);
    expect(places(valueTicks([-3, 12], false, 112))).toEqual([0, 5, 10]);
  });

  it('are powers of ten on a logarithmic axis, parts of them if these are few, and only some if they are many', () => {
    expect(texts(valueTicks([0.9, 110], true, 112))).toEqual(['1', '10', '100']);
    expect(texts(valueTicks([0.9, 12], true, 140))).toEqual(['1', '2', '5', '10']);
    expect(texts(valueTicks([3.1, 3.9], true, 140))).toEqual(['3.2', '3.4', '3.6', '3.8']);
    expect(valueTicks([1e-30, 1e30], true, 140).length).toBeLessThanOrEqual(5);
  });
});

describe('the values from which to which a plot goes', () => {
  it.each([
    [null, false, [0, 1]],
    [null, true, [0.1, 1]],
    [[5, 5], false, [2.5, 7.5]],
    [[0, 0], false, [-1, 1]],
    [[4, 4], true, [2, 8]],
    [[0.1, 10], false, [0, 10.594]],
    [[-1, 1], false, [-1.12, 1.12]],
  ] as const)('around %j, logarithmic or not: %s', (extent, log, expected) => {
    rangeOfValues(extent, log).forEach((one, at) => expect(one).toBeCloseTo(expected[at]!, 9));
  });
});
