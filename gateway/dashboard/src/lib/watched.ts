/** Watched tensors of a session, as its driver tells of them, and how they are drawn. */

export interface WatchedValues {
  /** Of the finite elements, as are the next ones; null if there are none. */
  norm: number | null;
  mean: number | null;
  std: number | null;
  min: number | null;
  max: number | null;
  /** The share of elements that are infinite or NaN. */
  nonfinite: number;
  /** Elements in bins of the same width, from `min` to `max`. */
  histogram: number[];
}

export interface WatchedTensor {
  mesh: string;
  name: string;
  gradients: number;
  /** Why the newest gradient could not be summarized; empty if it was. */
  trouble: string;
  time: number | null;
  steps: number[];
  weight_norms: (number | null)[];
  grad_norms: (number | null)[];
  weight: WatchedValues | null;
  grad: WatchedValues | null;
}

export interface SessionTensors {
  tensors: WatchedTensor[];
  left_out: number;
}

export const WIDTH = 240;
export const HEIGHT = 48;
const EDGE = 2; // above and below a line

const names = new Intl.Collator('en', { numeric: true });

/** Return the tensors whose name has a text in it, in the order of their names: layer 2 before layer 10. */
export function found(tensors: readonly WatchedTensor[], text: string): WatchedTensor[] {
  const part = text.trim().toLowerCase();
  return tensors
    .filter((one) => one.name.toLowerCase().includes(part))
    .sort((one, other) => names.compare(one.name, other.name) || names.compare(one.mesh, other.mesh));
}

/** Return the path of a line over steps. It has a gap where there is no value. */
export function linePath(steps: readonly number[], values: readonly (number | null)[]): string {
  const there = values.filter((value) => value !== null);
  if (!there.length) return '';
  const [first, last] = [steps[0]!, steps.at(-1)!];
  const [low, high] = [Math.min(...there), Math.max(...there)];
  const across = WIDTH / (last - first || 1);
  const up = (HEIGHT - 2 * EDGE) / (high - low || 1);
  let path = '';
  let drawing = false;
  values.forEach((value, at) => {
    if (value !== null) path += `${drawing ? 'L' : 'M'}${place((steps[at]! - first) * across)} ${place(HEIGHT - EDGE - (value - low) * up)}`;
    drawing = value !== null;
  });
  // A single step is a line, too.
  return steps.length === 1 ? `${path}H${WIDTH}` : path;
}

/** Return the path of the bars of a histogram. */
export function barsPath(counts: readonly number[]): string {
  const most = Math.max(...counts, 1);
  const wide = WIDTH / (counts.length || 1);
  return counts
    .map((count, at) => (count ? `M${place(at * wide)} ${HEIGHT}v${place((-HEIGHT * count) / most)}h${place(wide * 0.9)}V${HEIGHT}z` : ''))
    .join('');
}

const place = (value: number): string => String(Number(value.toFixed(1)));
