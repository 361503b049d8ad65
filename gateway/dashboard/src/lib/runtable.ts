/** The table of runs: its columns, order and groups. */

import { lossName } from './series';
import { grouped } from './sets';
import type { Run } from './types';
import { FIELDS, isField, keysOf, metricOf, metricValue, valueOf, type Keys } from './runvalues';

/** The column of sparklines. */
export const CURVE = 'curve';

const MOST_METRICS = 3;
const MOST_CONFIG = 4;

/** Return the title of a column. */
export function titleOf(key: string): string {
  if (isField(key)) return FIELDS[key].title;
  if (key === CURVE) return 'curve';
  const metric = metricOf(key);
  if (metric) return metric.part === 'summary' ? metric.metric : `${metric.metric} (${metric.part})`;
  return key.replace(/^config\./, '');
}

/** Return the columns that are shown unless others are chosen: state and times, the loss or else some metrics, and what differs between the configurations. */
export function defaultColumns(runs: readonly Run[], keys: Keys = keysOf(runs)): string[] {
  const loss = lossName(keys.metrics);
  return [
    ...['state', 'began', 'took', 'step'],
    ...(loss === null ? keys.metrics.slice(0, MOST_METRICS).map((one) => `summary.${one}`) : [CURVE, `summary.${loss}`, `min.${loss}`]),
    ...differing(runs, keys).slice(0, MOST_CONFIG).map((one) => `config.${one}`),
  ];
}

/** Return the keys of configurations with more than one value. */
export function differing(runs: readonly Run[], { config } = keysOf(runs)): string[] {
  return config.filter((key) => runs.some((one) => !isSame(one.config[key], runs[0]!.config[key])));
}

function isSame(one: unknown, other: unknown): boolean {
  return Object.is(one, other) || (typeof one === 'object' && typeof other === 'object' && JSON.stringify(one) === JSON.stringify(other));
}

/** Return all columns that some runs can have. */
export function allColumns({ metrics, config }: Keys): string[] {
  return [
    ...Object.keys(FIELDS).filter((one) => one !== 'name'),
    CURVE,
    ...metrics.flatMap((one) => [`summary.${one}`, `min.${one}`, `max.${one}`]),
    ...config.map((one) => `config.${one}`),
  ];
}

/** Whether a column's values are numbers, as far as the runs tell. */
export function isNumber(key: string, runs: readonly Run[]): boolean {
  if (isField(key)) return 'number' in FIELDS[key];
  if (key === CURVE) return false;
  if (metricOf(key)) return true;
  const found = runs.find((one) => valueOf(one, key, 0) !== null);
  return found !== undefined && typeof valueOf(found, key, 0) === 'number';
}

/** Whether the values of a column's key change while nothing happens. */
export function goesOn(key: string): boolean {
  return key.replace(/^-/, '') === 'took';
}

/** Return runs in the order of a key, with `-` in front from large to small. Runs without a value, or with one that is not a number, come last. */
export function sortRuns(runs: readonly Run[], sort: string, now: number): Run[] {
  const down = sort.startsWith('-');
  const key = sort.replace(/^-/, '');
  const keyed = runs.map((run) => ({ run, value: orderOf(valueOf(run, key === CURVE ? 'began' : key, now)) }));
  const sign = down ? -1 : 1;
  keyed.sort(({ value: one }, { value: other }) => {
    if (one === null || other === null) return Number(one === null) - Number(other === null);
    if (typeof one !== typeof other) return typeof one === 'number' ? -1 : 1;
    return one < other ? -sign : one > other ? sign : 0;
  });
  return keyed.map(({ run }) => run);
}

function orderOf(value: unknown): number | string | null {
  if (typeof value === 'number') return Number.isNaN(value) ? null : value;
  if (typeof value === 'boolean') return Number(value);
  if (typeof value === 'string') return value.toLowerCase();
  return value == null ? null : JSON.stringify(value);
}

export type Direction = 'less' | 'more';

const MORE = /acc|reward|return|score|f1|auc|bleu|rouge|precision|recall|psnr|ssim|iou|win|success|throughput|mfu|per_sec/i;
const LESS = /loss|err|perplexity|ppl|wer|cer|mse|mae|nll|kl|latency|fid/i;

/** Return whether less or more of a metric is better, by its name; null if that does not say so. */
export function directionOf(metric: string): Direction | null {
  return LESS.test(metric) ? 'less' : MORE.test(metric) ? 'more' : null;
}

export interface GroupFigures {
  mean: number | null;
  best: number | null;
}

/** Runs with the same value of a key. */
export interface RunGroup {
  /** The value as text. */
  value: string;
  runs: Run[];
}

/** Return the runs in groups by the value of a key. The groups have the order of their first runs. */
export function groupRuns(runs: readonly Run[], key: string, now: number): RunGroup[] {
  return [...grouped(runs, (run) => textOf(valueOf(run, key, now)))].map(([value, members]) => ({ value, runs: members }));
}

/** Return the mean and the best value of a numeric column over runs, of its finite values. */
export function figuresOf(runs: readonly Run[], key: string, now: number): GroupFigures {
  const values = runs.map((one) => valueOf(one, key, now)).filter((one): one is number => typeof one === 'number' && Number.isFinite(one));
  if (!values.length) return { mean: null, best: null };
  const metric = metricOf(key);
  const direction = metric ? directionOf(metric.metric) : null;
  const best = direction === null ? null : direction === 'less' ? Math.min(...values) : Math.max(...values);
  return { mean: values.reduce((sum, one) => sum + one, 0) / values.length, best };
}

function textOf(value: unknown): string {
  if (value == null) return 'none';
  return typeof value === 'string' ? value : JSON.stringify(value);
}

/** A row of the table. */
export type RunLine = { group: RunGroup; open: boolean } | { group: null; run: Run };

const lineOfRun = new WeakMap<Run, RunLine>(); // the same row for the same run, so that it is not made anew

function lineOf(run: Run): RunLine {
  let line = lineOfRun.get(run);
  if (!line) lineOfRun.set(run, (line = { group: null, run }));
  return line;
}

/** Return the rows: with groups each group's row, and below it its runs if it is open. */
export function linesOf(runs: readonly Run[], key: string | null, open: ReadonlySet<string>, now: number): RunLine[] {
  if (key === null) return runs.map(lineOf);
  return groupRuns(runs, key, now).flatMap((group): RunLine[] => {
    const isOpen = open.has(group.value);
    return [{ group, open: isOpen }, ...(isOpen ? group.runs.map(lineOf) : [])];
  });
}

/** Why somebody should look at a run; null if nobody has to. */
export function trouble(run: Run): { what: 'crashed' | 'lost' | 'stalled' | 'diverged' | 'not connected'; why: string } | null {
  if (run.state === 'crashed' || run.state === 'lost') return { what: run.state, why: run.reason ?? '' };
  if (run.state !== 'running') return null;
  if (run.replicas.stalled) return { what: 'stalled', why: `${run.replicas.stalled} of ${run.ranks} take no steps` };
  const loss = lossName(Object.keys(run.summary));
  const last = loss === null ? null : metricValue(run, loss);
  const least = loss === null ? null : metricValue(run, loss, 'min');
  if (last !== null && !Number.isFinite(last)) return { what: 'diverged', why: `${loss} is ${Number.isNaN(last) ? 'not a number' : 'infinite'}` };
  if (last !== null && least !== null && isFarAbove(run, loss!, last, least)) return { what: 'diverged', why: `${loss} is far above its best` };
  if (run.replicas.recovering && run.replicas.recovering === livingOf(run)) return { what: 'not connected', why: `${run.ranks === 1 ? 'it is' : 'all its ranks are'} not connected` };
  return null;
}

/** The loss has lost most of what the run had gained: it is nearer to its worst than to its best by far. */
function isFarAbove(run: Run, loss: string, last: number, least: number): boolean {
  const greatest = metricValue(run, loss, 'max');
  if (greatest === null || !Number.isFinite(greatest) || !Number.isFinite(least)) return false;
  const gained = greatest - least;
  return last > Math.abs(least) * 3 && last > least + 0.5 * gained && (run.summary[loss]?.[3] ?? 0) > 50;
}

function livingOf(run: Run): number {
  return Object.values(run.replicas).reduce((sum, one) => sum + one, 0);
}
