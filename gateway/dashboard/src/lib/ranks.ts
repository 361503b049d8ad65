/** Jobs of several ranks: their lines in a table, and their configuration. */

import { isLiving, type Replica } from './store/replicas';

/** A line of the table: a job of several ranks, or one replica. */
export type Line = JobLine | { job: null; replica: Replica };

export interface JobLine {
  job: string;
  ranks: readonly Replica[];
  open: boolean;
}

const FEW = 8; // ranks of a job that is open at first

/**
 * Return the lines of replicas that stand by job: a job of several ranks has one, and its ranks below it while it is open.
 *
 * @param turned the jobs that are not as they are at first: open with few ranks, and closed with many
 */
export function linesOf(replicas: readonly Replica[], turned: ReadonlySet<string>): Line[] {
  const lines: Line[] = [];
  for (let from = 0, until = 0; from < replicas.length; from = until) {
    const { job } = replicas[from]!;
    while (until < replicas.length && replicas[until]!.job === job) until += 1;
    const ranks = replicas.slice(from, until);
    const open = ranks.length <= FEW !== turned.has(job);
    if (ranks.length > 1) lines.push({ job, ranks, open });
    if (open || ranks.length === 1) for (const replica of ranks) lines.push({ job: null, replica });
  }
  return lines;
}

/** A key of the ranks' configuration. */
export interface ConfigRow {
  key: string;
  /** The type that its handler takes; null if no rank has a handler. */
  type: string | null;
  /** The value of all ranks that have one, or of the first of them where they differ. */
  value: unknown;
  /** The ranks' values where they differ, by replica; null where they are one. */
  differing: [replica: string, value: unknown][] | null;
  /** What the schedule has, which the value was set in place of; undefined without. */
  schedule: unknown;
}

const SCHEDULE = '_schedule'; // a key's suffix, under which a rank reports its schedule's own value

/** Return the configuration of the ranks of a job. */
export function configOf(ranks: readonly Replica[]): ConfigRow[] {
  const keys = new Set(ranks.flatMap((one) => [...Object.keys(one.handlers), ...Object.keys(one.config)]));
  const scheduled = (key: string): boolean => key.endsWith(SCHEDULE) && keys.has(key.slice(0, -SCHEDULE.length));
  return [...keys].filter((key) => !scheduled(key)).sort().map((key) => {
    const values = ranks.filter((one) => key in one.config).map((one): [string, unknown] => [one.id, one.config[key]]);
    const [first] = values;
    const same = values.every(([, value]) => JSON.stringify(value) === JSON.stringify(first?.[1]));
    return {
      key,
      type: ranks.find((one) => key in one.handlers)?.handlers[key] ?? null,
      value: first?.[1],
      differing: same ? null : values,
      schedule: ranks.find((one) => key + SCHEDULE in one.config)?.config[key + SCHEDULE],
    };
  });
}

/** Return the ids of the replicas that a command to a job is for: a job's ranks change together. */
export function livingOf(ranks: readonly Replica[]): string[] {
  return ranks.filter(isLiving).map((one) => one.id);
}

/** Return why commands would be refused by all of these replicas; the ranks of a job refuse what one of them refuses. */
export function notOffered(replicas: readonly Replica[]): Record<string, string> {
  const units = new Map<string, Record<string, string>>();
  for (const one of replicas) {
    const unit = (one.cohort?.world ?? 1) > 1 ? `ranks ${one.cohort!.id}` : `one ${one.id}`;
    units.set(unit, { ...one.not_offered, ...units.get(unit) });
  }
  const [first = {}, ...others] = units.values();
  return Object.fromEntries(Object.entries(first).filter(([kind]) => others.every((other) => kind in other)));
}
