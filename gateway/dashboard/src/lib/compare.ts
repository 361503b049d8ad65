/** Runs beside each other: their curves, the differences of their configurations and starts, and their values at a step. */

import { firstFrom, linesOf, type Line, type LineStyle } from './sections';
import type { Direction } from './runtable';
import type { CurveSection, RunDetails } from './types';

export const MOST_COMPARED = 8;

export type CompareAxis = 'step' | 'elapsed';

// Each run has a colour and dashes of its own, for those who do not tell all colours apart.
const DASHES: readonly (readonly number[])[] = [[], [7, 3], [2, 3], [10, 3, 2, 3], [4, 2], [12, 4], [1, 2], [6, 2, 1, 2, 1, 2]];

export function styleOf(place: number, name = ''): LineStyle {
  return { name, colour: `c-${place % MOST_COMPARED}`, dashes: DASHES[place % MOST_COMPARED]! };
}

/** Return the lines of a run over its steps, or over the seconds since it began. */
export function linesOfRun(run: RunDetails, sections: readonly CurveSection[], axis: CompareAxis): Line[] {
  if (axis === 'step') return linesOf(run.id, sections, 'step', null, 0);
  const since = sections.map((one) => ({ ...one, time: one.time.map((time) => time - run.began) }));
  return linesOf(run.id, since, 'time', null, 0);
}

/** Return the last value at or before a place of the axis; null if there is none. The later section counts, which made a step again. */
export function valueAt(lines: readonly Line[], x: number): number | null {
  for (const line of lines.toReversed()) {
    let at = firstFrom(line.x, x);
    if (at === line.x.length || line.x[at]! > x) at -= 1;
    if (at >= 0 && Number.isFinite(line.raw[at]!)) return line.raw[at]!;
  }
  return null;
}

/** A key with a value of each run; undefined if a run has none. */
export interface Row {
  key: string;
  values: unknown[];
  differs: boolean;
}

/** Return the keys of several objects, with nested ones as `outer.inner`. */
export function rowsOf(objects: readonly Readonly<Record<string, unknown>>[]): Row[] {
  const flat = objects.map((one) => flatten(one));
  const keys = [...new Set(flat.flatMap((one) => [...one.keys()]))].sort();
  return keys.map((key) => {
    const values = flat.map((one) => one.get(key));
    return { key, values, differs: new Set(values.map((one) => JSON.stringify(one))).size > 1 };
  });
}

function flatten(given: Readonly<Record<string, unknown>>, before = '', into = new Map<string, unknown>()): Map<string, unknown> {
  for (const [key, value] of Object.entries(given))
    if (value !== null && typeof value === 'object' && !Array.isArray(value) && Object.keys(value).length) flatten(value as Record<string, unknown>, `${before}${key}.`, into);
    else into.set(before + key, value);
  return into;
}

/** A change of a key while a run ran. */
export interface LaterChange {
  value: unknown;
  step: number | null;
}

/** Return the last change of each key of a run's configuration. */
export function laterChanges({ timeline }: RunDetails): Map<string, LaterChange> {
  const found = new Map<string, LaterChange>();
  for (const mark of timeline) {
    if (mark.kind !== 'command') continue;
    const changes = (mark['changes'] as Record<string, { new?: unknown }> | undefined) ?? {};
    for (const key in changes) found.set(key, { value: changes[key]!.new, step: mark.step });
  }
  return found;
}

/** Return the difference to another value as text, absolute and relative; empty if there is none to tell. */
export function differenceOf(value: number | null, base: number | null): string {
  if (value === null || base === null || !Number.isFinite(value) || !Number.isFinite(base)) return '';
  const difference = value - base;
  if (difference === 0) return '±0';
  const sign = difference > 0 ? '+' : '−';
  const size = Number(Math.abs(difference).toPrecision(3));
  const text = size >= 1e6 || size < 1e-4 ? size.toExponential(2).replace('e+', 'e') : String(size);
  const share = base === 0 ? null : Math.abs(difference / base) * 100;
  return `${sign}${text}${share === null || share >= 1000 ? '' : ` (${sign}${share < 10 ? share.toFixed(1) : share.toFixed(0)} %)`}`;
}

/** Return the place of the best of some values; −1 if fewer than two are there, all are alike, or it is not known which is better. */
export function bestOf(values: readonly (number | null)[], direction: Direction | null): number {
  if (direction === null) return -1;
  const there = values.map((one) => (one === null || !Number.isFinite(one) ? null : one));
  const finite = there.filter((one): one is number => one !== null);
  if (finite.length < 2 || new Set(finite).size < 2) return -1;
  return there.indexOf(direction === 'less' ? Math.min(...finite) : Math.max(...finite));
}
