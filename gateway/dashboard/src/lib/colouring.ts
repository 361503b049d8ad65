/** Colours of the cells of replicas: a bin for each, by state or by a measured value. */

import { ENDED, STATES } from './types';

export const MODES = ['state', 'lag', 'loss', 'pace'] as const;

export type Mode = (typeof MODES)[number];

export const MODE_NAMES: Record<Mode, string> = {
  state: 'state',
  lag: 'step lag',
  loss: 'loss',
  pace: 'seconds a step',
};

/** Bins 0 to 7 are states, then come those of the ramp, then these two. */
export const RAMP_BINS = 16;
export const FIRST_OF_RAMP = STATES.length;
export const UNKNOWN = FIRST_OF_RAMP + RAMP_BINS;
export const NOT_FINITE = UNKNOWN + 1;
export const BINS = NOT_FINITE + 1;

interface Coloured {
  state: string;
  job: string;
  step: number | null;
  loss: number | null;
  pace: number | null;
}

export interface Colouring {
  bins: Uint8Array;
  /** The values at both ends of the ramp; null if no replica has one, or by state. */
  low: number | null;
  high: number | null;
}

const STATE_BINS = new Map<string, number>(STATES.map((state, at) => [state, at]));

export function colourCells(mode: Mode, replicas: readonly Coloured[]): Colouring {
  const bins = new Uint8Array(replicas.length);
  if (mode === 'state') {
    for (let at = 0; at < bins.length; at += 1) bins[at] = STATE_BINS.get(replicas[at]!.state) ?? UNKNOWN;
    return { bins, low: null, high: null };
  }
  const values = valuesOf(mode, replicas);
  const [low, high] = mode === 'lag' ? rangeOfLag(values) : spread(values);
  if (low === null || high === null) return { bins: bins.fill(UNKNOWN), low, high };
  const width = high - low || 1;
  for (let at = 0; at < bins.length; at += 1) {
    const one = values[at]!;
    if (ENDED.has(replicas[at]!.state)) bins[at] = UNKNOWN;
    else if (one === Infinity || Number.isNaN(one)) bins[at] = Number.isNaN(one) && !isNaNLoss(mode, replicas[at]!) ? UNKNOWN : NOT_FINITE;
    else bins[at] = FIRST_OF_RAMP + Math.max(0, Math.min(RAMP_BINS - 1, Math.floor(((one - low) / width) * RAMP_BINS)));
  }
  return { bins, low, high };
}

/** Return each job's highest step. */
export function leaders(replicas: Iterable<Coloured>): Map<string, number> {
  const highest = new Map<string, number>();
  for (const one of replicas) {
    if (one.step === null || ENDED.has(one.state)) continue;
    const known = highest.get(one.job);
    if (known === undefined || one.step > known) highest.set(one.job, one.step);
  }
  return highest;
}

function isNaNLoss(mode: Mode, one: Coloured): boolean {
  return mode === 'loss' && one.loss !== null;
}

/** Values, with NaN for those that are unknown. */
function valuesOf(mode: Mode, replicas: readonly Coloured[]): Float64Array {
  const values = new Float64Array(replicas.length);
  const highest = mode === 'lag' ? leaders(replicas) : null;
  for (let at = 0; at < values.length; at += 1) {
    const one = replicas[at]!;
    if (mode === 'lag') values[at] = one.step === null ? NaN : (highest!.get(one.job) ?? one.step) - one.step;
    else values[at] = (mode === 'loss' ? one.loss : one.pace) ?? NaN;
  }
  return values;
}

function rangeOfLag(values: Float64Array): [number | null, number | null] {
  let high: number | null = null;
  for (const one of values) if (Number.isFinite(one) && (high === null || one > high)) high = one;
  return high === null ? [null, null] : [0, Math.max(high, 4)];
}

/** The range without outliers: from the 2nd to the 98th percentile. */
function spread(values: Float64Array): [number | null, number | null] {
  const finite = values.filter(Number.isFinite).sort();
  if (!finite.length) return [null, null];
  const at = (share: number): number => finite[Math.round(share * (finite.length - 1))]!;
  return [at(0.02), at(0.98)];
}
