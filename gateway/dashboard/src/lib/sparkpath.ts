/** The path of a small curve: its sections between the least and the greatest value, with gaps between them. */

import type { CurveSection } from './types';

const EDGE = 2; // pixels around the curve

export function sparkPath(sections: readonly CurveSection[], wide: number, high: number): string {
  let [left, right, low, top, points] = [Infinity, -Infinity, Infinity, -Infinity, 0];
  each(sections, (x, y) => {
    if (x < left) left = x;
    if (x > right) right = x;
    if (y < low) low = y;
    if (y > top) top = y;
    points += 1;
  });
  if (points < 2) return '';
  const across = (wide - 2 * EDGE) / (right - left || 1);
  const up = (high - 2 * EDGE) / (top - low || 1);
  let path = '';
  each(sections, (x, y, begins) => {
    path += `${begins ? 'M' : 'L'}${(EDGE + (x - left) * across).toFixed(1)} ${(high - EDGE - (y - low) * up).toFixed(1)}`;
  });
  return path;
}

function each(sections: readonly CurveSection[], take: (x: number, y: number, begins: boolean) => void): void {
  for (const { step, time, value } of sections) {
    const by = step.every((one) => one !== null) ? (step as number[]) : time;
    let begins = true;
    value.forEach((one, at) => {
      if (one === null) return;
      take(by[at]!, one, begins);
      begins = false;
    });
  }
}
