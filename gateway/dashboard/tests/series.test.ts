import { describe, expect, it } from 'vitest';

import { joined, NO_POINTS, pointsOf, Series } from '../src/lib/series';

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

  it('takes no more memory when it is full, nor before', () => {
    const sizes = [0, 1, 900, 5000].map((points) => filled(points, 900).times.buffer.byteLength);
    expect(new Set(sizes)).toEqual(new Set([8 * 1125]));
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
