/** The curves of a run: sections from the weaver and live points, as lines over steps, time or samples. */

import { longestStep, type Points } from './series';
import type { CurveSection, RunCurves } from './types';

export const AXES = ['step', 'time', 'samples'] as const;

export type Axis = (typeof AXES)[number];

export type Range = readonly [from: number, until: number];

/** A section as a line. A value that is not finite is NaN, and the line has a gap there. */
export interface Line {
  /** The replica; null for all ranks together. */
  replica: string | null;
  x: Float64Array;
  /** The values that are drawn, smoothed if so chosen. */
  y: Float64Array;
  /** The values as they were reported. */
  raw: Float64Array;
  /** The extremes as they were reported. */
  low: Float64Array;
  high: Float64Array;
  /** The edges of the band that is drawn: the extremes, smoothed as the values are. */
  under: Float64Array;
  over: Float64Array;
  /** The place from which on the run made its steps again later, after a restart. */
  again: number;
}

/** How a line is drawn and called: a colour of app.css, and its dashes in pixels. */
export interface LineStyle {
  name: string;
  colour: string;
  dashes: readonly number[];
}

/** What a training counts beside its steps, over its steps: samples, tokens. */
export interface Counted {
  steps: Float64Array;
  amounts: Float64Array;
}

const COUNTS = [/(^|[/_.])num_input_tokens_seen$/i, /(^|[/_.])(samples|examples|tokens)([_/.]?(seen|total|count|so_far|trained))?$/i, /(^|[/_.])(total|consumed|seen)[_/.]?(samples|examples|tokens)$/i];

/** Return the metric that counts samples or tokens; null if there is none. */
export function countName(metrics: readonly string[]): string | null {
  for (const pattern of COUNTS) {
    const found = metrics.find((name) => pattern.test(name));
    if (found !== undefined) return found;
  }
  return null;
}

/** Return what was counted at each step; a step that was made again has its last amount. */
export function countedOf(sections: readonly CurveSection[]): Counted {
  const known = new Map<number, number>();
  for (const { step, value } of sections)
    step.forEach((one, at) => {
      const amount = value[at];
      if (one !== null && amount != null && Number.isFinite(amount)) known.set(one, amount);
    });
  const steps = Float64Array.from(known.keys()).sort();
  return { steps, amounts: Float64Array.from(steps, (one) => known.get(one)!) };
}

/** Return the value of a piecewise linear function, which goes on beyond its ends as it does there. */
export function interpolate(x: Float64Array, y: Float64Array, at: number): number {
  if (x.length < 2) return x.length ? y[0]! : NaN;
  const right = Math.min(Math.max(firstFrom(x, at), 1), x.length - 1);
  const [x0, x1, y0, y1] = [x[right - 1]!, x[right]!, y[right - 1]!, y[right]!];
  return x1 > x0 ? y0 + ((at - x0) / (x1 - x0)) * (y1 - y0) : y1;
}

/** Return the place of the first of ascending values that is not less than another one. */
export function firstFrom(values: ArrayLike<number>, least: number): number {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle]! < least) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * Return sections with the live points that came after them.
 *
 * @param values the live values of the metric over time
 * @param steps the steps of the replica over time
 */
export function withLive(sections: readonly CurveSection[], values: Points, steps: Points): CurveSection[] {
  const made = [...sections];
  const last = sections.at(-1);
  const from = firstFrom(values.times, (last?.time.at(-1) ?? -Infinity) + 1e-6);
  if (from === values.times.length) return made;
  const longest = longestStep(values.times);
  let current: CurveSection = last ? copyOf(last) : emptySection();
  if (last) made[made.length - 1] = current;
  else made.push(current);
  for (let at = from; at < values.times.length; at += 1) {
    const time = values.times[at]!;
    const step = steps.values[firstFrom(steps.times, time)] ?? null;
    const before = current.step.at(-1) ?? null;
    const fell = before !== null && step !== null && step < before;
    if (fell || (at > from && time - values.times[at - 1]! > longest)) made.push((current = emptySection()));
    const value = values.values[at]!;
    current.time.push(time);
    current.step.push(step);
    for (const column of [current.value, current.low, current.high]) column.push(Number.isFinite(value) ? value : null);
  }
  return made;
}

function emptySection(): CurveSection {
  return { time: [], step: [], value: [], low: [], high: [] };
}

function copyOf({ time, step, value, low, high }: CurveSection): CurveSection {
  return { time: [...time], step: [...step], value: [...value], low: [...low], high: [...high] };
}

const NOT = (one: number | null | undefined): number => one ?? NaN;

/**
 * Return the sections of a replica, or of all ranks, as lines over an axis.
 *
 * @param counted needed for samples
 * @param smoothing from 0, for none, to below 1
 */
export function linesOf(replica: string | null, sections: readonly CurveSection[], axis: Axis, counted: Counted | null, smoothing: number): Line[] {
  const made: Line[] = [];
  let least = Infinity; // the least step of all later sections
  for (const section of sections.toReversed()) {
    const places = Array.from(section.time.keys()).filter((at) => axis === 'time' || section.step[at] !== null);
    const xOf = (at: number): number => {
      if (axis === 'time') return section.time[at]!;
      const step = section.step[at]!;
      return axis === 'step' ? step : counted ? interpolate(counted.steps, counted.amounts, step) : NaN;
    };
    const x = Float64Array.from(places, xOf);
    const raw = Float64Array.from(places, (at) => NOT(section.value[at]));
    const steps = places.map((at) => section.step[at] ?? -Infinity);
    const low = Float64Array.from(places, (at) => NOT(section.low[at]));
    const high = Float64Array.from(places, (at) => NOT(section.high[at]));
    made.push({
      replica,
      x,
      raw,
      y: raw,
      low,
      high,
      under: low,
      over: high,
      again: firstFrom(steps, least),
    });
    least = Math.min(least, section.step.find((one) => one !== null) ?? Infinity);
  }
  made.reverse();
  const lines = made.filter((line) => line.x.length);
  if (smoothing > 0) {
    const span = (lines.at(-1)?.x.at(-1) ?? 0) - (lines[0]?.x[0] ?? 0);
    for (const line of lines) [line.y, line.under, line.over] = [line.raw, line.low, line.high].map((one) => smooth(line.x, one, smoothing, span)) as [Float64Array, Float64Array, Float64Array];
  }
  return lines;
}

const VIEWPORT = 1000; // parts of the whole span, in each of which the weight of what came before falls by the factor once

/**
 * Return values smoothed by an exponential moving average that is weighted by the distance of its points.
 *
 * The same weight smooths a curve alike, however many points it has. What is not finite stays a gap.
 */
export function smooth(x: Float64Array, y: Float64Array, weight: number, span: number): Float64Array {
  const factor = Math.min(Math.sqrt(weight), 0.999);
  let [mean, sum, before] = [0, 0, x[0] ?? 0];
  return y.map((value, at) => {
    if (!Number.isFinite(value)) return NaN;
    const kept = span > 0 ? factor ** ((Math.abs(x[at]! - before) / span) * VIEWPORT) : factor;
    before = x[at]!;
    mean = mean * kept + value;
    sum = sum * kept + 1;
    return mean / sum;
  });
}

/** Return the lines of all curves of an answer. */
export function linesOfAll({ curves }: Pick<RunCurves, 'curves'>, axis: Axis, counted: Counted | null, smoothing: number): Line[] {
  return curves.flatMap(({ replica, sections }) => linesOf(replica, sections, axis, counted, smoothing));
}

/** Return from where to where lines go; null if there is no point. */
export function domainOf(lines: readonly Line[]): [number, number] | null {
  let [from, until] = [Infinity, -Infinity];
  for (const { x } of lines) {
    from = Math.min(from, x[0]!);
    until = Math.max(until, x.at(-1)!);
  }
  if (from > until) return null;
  return from === until ? [from - 0.5, until + 0.5] : [from, until];
}

const TAILS = 0.02; // share of the values behind a line, at each end, that may lie outside of what is shown

/**
 * Return the values from which to which a plot goes: all of its lines, and of what is drawn behind them all but the extremes.
 *
 * One point of one rank would otherwise flatten the curve. Null: there is none, or for `log` none above 0.
 *
 * @param behind whether bands and reported values are drawn behind the lines
 */
export function extentOf(lines: readonly Line[], [from, until]: Range, log: boolean, behind = true): [number, number] | null {
  const usable = (one: number): boolean => Number.isFinite(one) && !(log && one <= 0);
  let [least, most] = [Infinity, -Infinity];
  const around: number[] = [];
  for (const { x, y, raw, under, over } of lines)
    for (let at = firstFrom(x, from); at < x.length && x[at]! <= until; at += 1) {
      if (usable(y[at]!)) [least, most] = [Math.min(least, y[at]!), Math.max(most, y[at]!)];
      if (behind) around.push(...[raw[at]!, under[at]!, over[at]!].filter(usable));
    }
  if (least > most) return null;
  const sorted = Float64Array.from(around).sort();
  const tail = Math.floor(TAILS * sorted.length);
  return [Math.min(least, sorted[tail] ?? least), Math.max(most, sorted[sorted.length - 1 - tail] ?? most)];
}

export interface Reading {
  line: Line;
  at: number;
}

/** Return the points nearest to a place of the axis, one of each replica: where several sections have some, the last one's. */
export function readingsAt(lines: readonly Line[], x: number, [from, until]: Range): Reading[] {
  const near = (until - from) / 40;
  const found = new Map<string | null, Reading>();
  for (const line of lines) {
    if (x < line.x[0]! - near || x > line.x.at(-1)! + near) continue;
    const right = Math.min(firstFrom(line.x, x), line.x.length - 1);
    const at = right > 0 && x - line.x[right - 1]! < line.x[right]! - x ? right - 1 : right;
    found.set(line.replica, { line, at });
  }
  return [...found.values()];
}

/** Return the place of a time on the axis of steps, from the last section that was made by then; null if nothing was. */
export function stepAt(sections: readonly CurveSection[], time: number): number | null {
  const section = sections.findLast((one) => one.time.length && one.time[0]! <= time);
  if (!section) return sections[0]?.step.find((one) => one !== null) ?? null;
  const steps = Float64Array.from(section.step, (one) => one ?? NaN);
  const inside = Math.min(time, section.time.at(-1)!);
  const found = interpolate(Float64Array.from(section.time), steps, inside);
  return Number.isFinite(found) ? Math.round(found) : null;
}

/** Return the part of the axis in an address, such as `900-1400`; null if there is none. */
export function parseZoom(text: string | undefined): [number, number] | null {
  const match = /^(-?\d+(?:\.\d+)?)-(-?\d+(?:\.\d+)?)$/.exec(text ?? '');
  if (!match) return null;
  const [from, until] = [Number(match[1]), Number(match[2])];
  return from < until ? [from, until] : null;
}

export function formatZoom([from, until]: Range): string {
  const digits = until - from > 20 ? 0 : 2;
  return `${from.toFixed(digits)}-${until.toFixed(digits)}`;
}

/** Return the metrics in an address or a browser's memory, and as its text. */
export function parsePinned(text: string): string[] {
  return [...new Set(text.split(',').filter(Boolean).map((one) => one.replaceAll('%2C', ',').replaceAll('%25', '%')))];
}

export function formatPinned(names: readonly string[]): string {
  return names.map((one) => one.replaceAll('%', '%25').replaceAll(',', '%2C')).join(',');
}
