/** The path of a small curve: its sections between the least and the greatest value, with gaps between them. */

import type { CurveSection } from './types';

const EDGE = 2; // pixels around the curve

export function sparkPath(sections: readonly CurveSection[], wide: number, high: number): string {
  const points = sections.map(({ step, time, value }) => {
    const by = step.every((one) => one !== null) ? (step as number[]) : time;
    return value.flatMap((one, at): [number, number][] => (one === null ? [] : [[by[at]!, one]]));
  });
  const all = points.flat();
  if (all.length < 2) return '';
  const [left, right] = boundsOf(all.map(([x]) => x));
  const [low, top] = boundsOf(all.map(([, y]) => y));
  const x = (given: number): string => (EDGE + ((given - left) / (right - left || 1)) * (wide - 2 * EDGE)).toFixed(1);
  const y = (given: number): string => (high - EDGE - ((given - low) / (top - low || 1)) * (high - 2 * EDGE)).toFixed(1);
  return points.flatMap((one) => one.map(([at, value], place) => `${place ? 'L' : 'M'}${x(at)} ${y(value)}`)).join('');
}

function boundsOf(values: readonly number[]): [least: number, greatest: number] {
  let [least, greatest] = [Infinity, -Infinity];
  for (const one of values) {
    if (one < least) least = one;
    if (one > greatest) greatest = one;
  }
  return [least, greatest];
}
