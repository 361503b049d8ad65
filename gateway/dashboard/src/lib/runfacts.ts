/** What the page says of one run: its cause in words, its figures, and its configuration after all changes. */

import { count, duration, isolate, number, percent, shortName, toNumber } from './format';
import { changesOf } from './runmarks';
import type { Run, RunDetails } from './types';

/** Return a run's state with its cause, such as `crashed: train_1 first, CUDA out of memory, at step 4,255 of 20,000`. */
export function causeOf(run: Pick<Run, 'state' | 'first' | 'reason' | 'by' | 'step' | 'max_step'>): string {
  const parts = [];
  if (run.first) parts.push(`${isolate(shortName(run.first))} first`);
  if (run.reason) parts.push(isolate(run.reason.replace(/[\s.]+$/, '')));
  if (run.step !== null) parts.push(`at step ${count(run.step)}${run.max_step === null ? '' : ` of ${count(run.max_step)}`}`);
  const state = run.by ? `${run.state} by ${isolate(run.by)}` : run.state;
  return parts.length ? `${state}: ${parts.join(', ')}` : state;
}

export function toneOfState(state: string): 'good' | 'warning' | 'bad' | '' {
  if (state === 'running' || state === 'completed') return 'good';
  if (state === 'crashed' || state === 'lost') return 'bad';
  return state === 'stopped' || state === 'cancelled' ? '' : 'warning';
}

/** A number about a run; with a metric it can be shown as a curve. */
export interface Figure {
  name: string;
  text: string;
  metric: string | null;
}

const TOKENS = /(^|[/_.])(tokens?([_/.]?(per|a|\/)[_/.]?s(ec(ond)?s?)?([_/.]per[_/.](gpu|device|rank))?)|tps|throughput\(tps\)|tok(ens)?\/s)$/i;
const MFU = /(^|[/_.( ])mfu([/_.()% ]|$)/i;
const GRADIENT = /(^|[/_.])grad(ient)?s?[_/.]?norm$|total_grad_norm$/i;
const MEMORY = /(^|[/_.])(gpu_)?mem(ory)?[/_.]?.*(alloc|reserved|used|active|peak|max|bytes|gib|gb)|^(max_)?(gpu_)?memory(_bytes)?$/i;

/** Return the figures that the metrics of a run give: what is not reported is left out. */
export function reportedFigures(metrics: readonly string[], valueOf: (metric: string) => number | null): Figure[] {
  const found: Figure[] = [];
  const put = (name: string, pattern: RegExp, show: (value: number, metric: string) => string): void => {
    const metric = metrics.find((one) => pattern.test(one));
    const value = metric === undefined ? null : valueOf(metric);
    if (metric !== undefined && value !== null) found.push({ name, metric, text: show(value, metric) });
  };
  put('tokens/s', TOKENS, (value) => number(value));
  put('MFU', MFU, (value) => percent(value > 1.5 ? value / 100 : value, 1));
  put('gradient norm', GRADIENT, (value) => number(value));
  put('GPU memory', MEMORY, memoryText);
  return found;
}

function memoryText(value: number, metric: string): string {
  const name = metric.toLowerCase();
  if (/pct|percent|%|\(%\)/.test(name)) return `${number(value)} %`;
  if (name.includes('gib')) return `${number(value)} GiB`;
  if (/gb/.test(name)) return `${number(value)} GB`;
  if (/mib|mb/.test(name)) return `${number(value)} MiB`;
  return value >= 2 ** 20 ? `${number(value / 2 ** 30)} GiB` : number(value);
}

/** Return the steps a second of a run that has ended, over all of its time. */
export function meanRate({ began, ended, step }: Pick<Run, 'began' | 'ended' | 'step'>): number | null {
  return ended === null || step === null || ended <= began ? null : step / (ended - began);
}

/** Return the time that is left at a pace; null if it is not known. */
export function leftAt(step: number | null, most: number | null, rate: number | null): string | null {
  return most === null || step === null || !rate || step >= most ? null : duration((most - step) / rate);
}

/** Return the number of GPUs of a run: those that its living replicas name, or of each host as its start told. */
export function gpusOf(run: RunDetails, devices: number): number {
  if (devices) return devices;
  const told = (run.start['gpus'] as unknown[] | undefined)?.length ?? 0;
  const hosts = new Set(run.members.map((one) => one.host)).size;
  return told * Math.max(1, hosts);
}

/** Return what a run has cost until a time, at a price for a GPU and an hour; null if it has no GPU or no price is set. */
export function costOf(run: RunDetails, gpus: number, price: number | null, now: number): number | null {
  return price === null || !gpus ? null : (price * gpus * Math.max(0, (run.ended ?? now) - run.began)) / 3600;
}

/** Return the configuration after all changes of the timeline. */
export function configAfter({ config, timeline }: Pick<RunDetails, 'config' | 'timeline'>): Record<string, unknown> {
  const after = { ...config };
  for (const mark of timeline) if (Number(mark['applied'] ?? 0)) for (const [key, change] of Object.entries(changesOf(mark))) after[key] = change.new;
  return after;
}

/** Return the value of a metric at the end, from the summary. */
export function lastOf({ summary }: Pick<Run, 'summary'>, metric: string): number | null {
  const known = summary[metric];
  return known ? toNumber(known[0]) : null;
}

/** Return the command line that starts a branch, in words of a shell. */
export function branchCommand(run: string, step: number | null, changes: Readonly<Record<string, string>>, replace: boolean): string {
  const quoted = (word: string): string => (/^[\w./:=,@%+-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`);
  const words = ['loom', 'branch', run];
  if (step !== null) words.push('--step', String(step));
  for (const [key, text] of Object.entries(changes)) words.push('--set', `${key}=${text}`);
  if (replace) words.push('--replace');
  return words.map(quoted).join(' ');
}

