/** The values of a run by key: its fields, metrics (`summary.loss`, `min.loss`, `max.loss`) and configuration (`config.lr`). */

import { toNumber } from './format';
import type { Run } from './types';

export interface Field {
  title: string;
  number?: boolean;
  value: (run: Run, now: number) => string | number | boolean | null;
}

/** The seconds that a run took, or takes until now. */
export function tookOf(run: Run, now: number): number {
  return Math.max(0, (run.ended ?? now) - run.began);
}

export const FIELDS = {
  name: { title: 'run', value: (run) => run.name },
  state: { title: 'state', value: (run) => run.state },
  began: { title: 'began', number: true, value: (run) => run.began },
  ended: { title: 'ended', number: true, value: (run) => run.ended },
  took: { title: 'took', number: true, value: tookOf },
  step: { title: 'step', number: true, value: (run) => run.step },
  max_step: { title: 'last step', number: true, value: (run) => run.max_step },
  ranks: { title: 'ranks', number: true, value: (run) => run.ranks },
  restarts: { title: 'restarts', number: true, value: (run) => run.restarts },
  user: { title: 'user', value: (run) => run.user },
  reason: { title: 'cause', value: (run) => run.reason },
  by: { title: 'stopped by', value: (run) => run.by },
  tag: { title: 'tags', value: (run) => run.tags.join(', ') || null },
  note: { title: 'note', value: (run) => run.note || null },
  commit: { title: 'commit', value: (run) => run.commit },
  clean: { title: 'clean', value: (run) => run.clean },
  command: { title: 'command', value: (run) => run.command.join(' ') || null },
  session: { title: 'session', value: (run) => run.session },
  parent: { title: 'parent', value: (run) => run.parent?.run ?? null },
  id: { title: 'id', value: (run) => run.id },
} as const satisfies Record<string, Field>;

const PARTS = { summary: 0, min: 1, max: 2 } as const;

export type Part = keyof typeof PARTS;

export function isField(key: string): key is keyof typeof FIELDS {
  return Object.hasOwn(FIELDS, key);
}

/** Return the part of a metric that a key means, and the metric; null for another key. */
export function metricOf(key: string): { part: Part; metric: string } | null {
  const at = key.indexOf('.');
  const part = key.slice(0, at);
  return at > 0 && Object.hasOwn(PARTS, part) ? { part: part as Part, metric: key.slice(at + 1) } : null;
}

/** Return the value of a metric; null if the run has none. */
export function metricValue(run: Run, metric: string, part: Part = 'summary'): number | null {
  const found = Object.hasOwn(run.summary, metric) ? run.summary[metric] : undefined;
  return found === undefined ? null : toNumber(found[PARTS[part]]);
}

/** Return the value of a column's key: a field, `summary.M`, `min.M`, `max.M` or `config.K`; null if the run has none. */
export function valueOf(run: Run, key: string, now: number): unknown {
  if (isField(key)) return FIELDS[key].value(run, now);
  const metric = metricOf(key);
  if (metric) return metricValue(run, metric.metric, metric.part);
  const name = key.replace(/^config\./, '');
  return Object.hasOwn(run.config, name) ? run.config[name] : null;
}

/** Return what a key of an expression may mean in a run, the first choice first. A configuration comes before a metric of the same name. */
export function candidatesOf(run: Run, key: string): unknown[] {
  switch (key) {
    case 'tag':
    case 'tags':
      return [run.tags];
    case 'group':
      return [run.groups];
    case 'began':
    case 'ended':
      return [run[key] === null ? null : new Date(run[key] * 1000)];
  }
  if (isField(key)) return [FIELDS[key].value(run, Date.now() / 1000)];
  const given = [Object.hasOwn(run.config, key) ? run.config[key] : null, metricValue(run, key)];
  if (key.startsWith('config.') || metricOf(key)) given.push(valueOf(run, key, 0));
  return given.filter((one) => one !== null);
}

/** Return the texts that a glob is compared with. */
export function textsOf(run: Run, key: string): string[] {
  const [first] = candidatesOf(run, key);
  if (Array.isArray(first)) return first.map(String);
  return first == null || first instanceof Date ? [] : [String(first)];
}

/** The metrics and the keys of configurations of some runs, by how many have them. */
export interface Keys {
  metrics: string[];
  config: string[];
}

export function keysOf(runs: readonly Run[]): Keys {
  const common = (of: (run: Run) => object): string[] => {
    const counts = new Map<string, number>();
    for (const run of runs) for (const name in of(run)) counts.set(name, (counts.get(name) ?? 0) + 1);
    return [...counts].sort(([one, most], [other, more]) => more - most || (one < other ? -1 : 1)).map(([name]) => name);
  };
  return { metrics: common((run) => run.summary), config: common((run) => run.config) };
}

/** Return the keys of an expression that no run has. */
export function unknownKeys(keys: readonly string[], { metrics, config }: Keys): string[] {
  const known = new Set([...Object.keys(FIELDS), 'tags', 'group', ...metrics, ...config, ...config.map((one) => `config.${one}`)]);
  return keys.filter((one) => !known.has(one) && !metrics.includes(metricOf(one)?.metric ?? ''));
}

const SHORT = 6; // characters of an id beside a name, at least

/** Return a name for each run: its own, and of runs with one name also as much of the id as tells them apart. */
export function labelsOf(runs: readonly Pick<Run, 'name' | 'id'>[]): string[] {
  return runs.map((run) => {
    const others = runs.filter((one) => one.name === run.name && one.id !== run.id);
    if (!others.length) return run.name;
    let size = SHORT;
    while (size < run.id.length && others.some((one) => one.id.slice(0, size) === run.id.slice(0, size))) size += 1;
    return `${run.name} ${run.id.slice(0, size)}`;
  });
}
