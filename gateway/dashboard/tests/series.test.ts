import { describe, expect, it } from 'vitest';

import { loadPast, NO_PAST } from '../src/lib/past';
import type { loadCurves } from '../src/lib/runs.svelte';
import { joined, lossName, NO_POINTS, pointsOf, Series, withGaps, type Points } from '../src/lib/series';
import type { CurveSection, Run } from '../src/lib/types';
import { run } from './objects';

function filled(points: number, kept: number, room?: number): Series {
  const series = new Series(kept, room);
  for (let at = 0; at < points; at += 1) series.push(at, 10 * at);
  return series;
}

describe('a series', () => {
  it.each([3, 100, 124, 125, 126, 1000])('keeps the newest of %d points', (points) => {
    const series = filled(points, 100);
    const first = Math.max(0, points - 100);
    expect(series).toHaveLength(points - first);
    expect([series.times[0], series.times.at(-1)]).toEqual([first, points - 1]);
    expect([series.values[0], series.values.at(-1)]).toEqual([10 * first, 10 * (points - 1)]);
  });

  it('takes no memory before its first point, and then always as much', () => {
    const sizes = [0, 1, 900, 5000].map((points) => filled(points, 900).times.buffer.byteLength);
    expect(sizes).toEqual([0, 8 * 1125, 8 * 1125, 8 * 1125]);
  });

  it('takes more memory step by step if it begins with little room', () => {
    expect(filled(64, 900, 10).times.buffer.byteLength).toBe(8 * 64);
    expect(filled(65, 900, 10).times.buffer.byteLength).toBe(8 * 128);
    expect(filled(5000, 900, 10).times.buffer.byteLength).toBe(8 * 1125);
  });

  it('never changes a view that was taken of it', () => {
    const series = filled(80, 100);
    const { times } = series;
    for (let at = 80; at < 1000; at += 1) series.push(at, 0);
    expect([...times]).toEqual(Array.from({ length: 80 }, (_, at) => at));
  });

  it('leaves out points without a finite value', () => {
    const series = new Series(10);
    for (const [time, value] of [[1, null], [2, 5], [3, NaN], [4, Infinity], [5, 6]] as const) series.push(time, value);
    expect([[...series.times], [...series.values]]).toEqual([[2, 5], [5, 6]]);
  });
});

describe('a gap', () => {
  it('is kept once, and only after a point', () => {
    const series = new Series(10);
    series.gap(1);
    series.push(2, 5);
    series.gap(3);
    series.gap(4);
    series.push(5, 6);
    expect([[...series.times], [...series.values]]).toEqual([[2, 3, 5], [5, NaN, 6]]);
  });

  const at = (times: number[]): Points => ({ times: Float64Array.from(times), values: Float64Array.from(times, () => 1) });

  it.each([
    [[], []],
    [[1], [1]],
    [[1, 2, 3, 4], [1, 2, 3, 4]],
    [[1, 2, 3, 9, 10], [1, 2, 3, 9, 10]], // for some seconds only
    [[1, 2, 3, 23, 24], [1, 2, 3, 13, 23, 24]],
    [[0, 60, 120, 180, 400, 460], [0, 60, 120, 180, 400, 460]], // not for much longer than usual
    [[0, 60, 120, 180, 780, 840], [0, 60, 120, 180, 480, 780, 840]],
  ])('is where there were no points for much longer than usual: %j', (times, expected) => {
    const { times: found, values } = withGaps(at(times));
    expect([...found]).toEqual(expected);
    expect([...values].map(Number.isNaN)).toEqual(expected.map((time) => !times.includes(time)));
  });
});

describe('the loss', () => {
  it.each([
    [[], null],
    [['reward', 'kl'], null],
    [['accuracy', 'train/loss', 'loss'], 'loss'],
    [['accuracy', 'train/loss', 'eval_loss'], 'train/loss'],
    [['Loss/policy'], 'Loss/policy'],
  ])('is the metric of its name, or the first one like it: %j', (names, name) => {
    expect(lossName(names)).toBe(name);
  });
});

describe('the past of a job', () => {
  const section = (time: number[], step: number[], value: (number | null)[]): CurveSection => ({ time, step, value, low: value, high: value });
  const answer = (...sections: CurveSection[]): typeof loadCurves => async (id, metric) =>
    Promise.resolve({ run: id, metric, by: 'time', ranks: 1, curves: [{ replica: null, sections }], outliers: [] });
  const of = (metric: string): Run => run('r', { summary: { [metric]: [1, 1, 1, 1] } });

  it('has the curve of its run, and the steps a second', async () => {
    const past = await loadPast(of('train/loss'), answer(section([0, 1, 600], [0, 20, 6000], [4, null, 2])));
    expect(past.name).toBe('train/loss');
    expect([[...past.losses.times], [...past.losses.values]]).toEqual([[0, 600], [4, 2]]);
    expect(past.rates.values.at(0)).toBe(20);
  });

  it('has gaps where it did not run, and no loss where there is none', async () => {
    const seconds = Array.from({ length: 20 }, (_, at) => at);
    const sections = [section(seconds, seconds, seconds.map(() => 0.5)), section(seconds.map((one) => one + 120), seconds, seconds.map(() => 0.5))];
    const past = await loadPast(of('reward'), answer(...sections));
    const { losses } = await loadPast(of('loss'), answer(...sections));
    expect([past.name, past.losses.times.length]).toEqual([null, 0]);
    for (const curve of [past.rates, losses]) expect([...withGaps(curve).values].filter(Number.isNaN)).toHaveLength(1);
    expect(Math.min(...past.rates.values)).toBe(1); // none between the sections
  });

  it('is nothing where nothing is known', async () => {
    expect(await loadPast(run('r'))).toEqual(NO_PAST);
    expect(await loadPast(of('loss'), answer())).toEqual({ ...NO_PAST, name: 'loss' });
  });
});

describe('points', () => {
  const history = pointsOf([[1, 10], [2, null], [3, 30], [4, NaN]]);

  it('are those with a finite value', () => {
    expect([[...history.times], [...history.values]]).toEqual([[1, 3], [10, 30]]);
  });

  it('are joined where the first source ends', () => {
    const live = pointsOf([[2, 20], [3, 31], [4, 40], [5, 50]]);
    const { times, values } = joined(history, live);
    expect([[...times], [...values]]).toEqual([[1, 3, 4, 5], [10, 30, 40, 50]]);
  });

  it('are those of the one source that has some', () => {
    expect(joined(history, NO_POINTS)).toBe(history);
    expect(joined(history, pointsOf([[2, 1]]))).toBe(history);
    expect(joined(NO_POINTS, history)).toBe(history);
  });
});
