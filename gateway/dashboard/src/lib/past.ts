/** The past of a job's curves, from what the weaver has of some of its replicas: a page sees only what comes while it is open. */

import { toNumber } from './format';
import { longestStep, lossName, NO_POINTS, type Points } from './series';
import type { MetricPoint } from './types';

export interface Past {
  /** The metric that is taken for the loss; null if there is none like it. */
  name: string | null;
  losses: Points;
  rates: Points;
}

export const NO_PAST: Past = { name: null, losses: NO_POINTS, rates: NO_POINTS };

/** What is asked for the past; the page's store. */
export interface Source {
  loadMetrics(replica: string): Promise<string[]>;
  loadHistory(replica: string, metric: string, since?: number, until?: number, points?: number): Promise<MetricPoint[]>;
}

const REPLICAS = 4; // whose histories stand for all of a job's
const POINTS = 300;

/** Load the past of the curves of a job. Replicas whose history cannot be had are left out. */
export async function loadPast(source: Source, replicas: readonly string[]): Promise<Past> {
  const found = await Promise.allSettled(replicas.slice(0, REPLICAS).map((replica) => historyOf(source, replica)));
  const histories = found.flatMap((one) => (one.status === 'fulfilled' ? [one.value] : []));
  return {
    name: histories.find((one) => one.name !== null)?.name ?? null,
    losses: meanOf(histories.map((one) => (one.name === null ? [] : one.points.map(([time, , value]) => [time, toNumber(value)])))),
    rates: meanOf(histories.map((one) => ratesOf(one.points))),
  };
}

async function historyOf(source: Source, replica: string): Promise<{ name: string | null; points: MetricPoint[] }> {
  const names = await source.loadMetrics(replica);
  const name = lossName(names);
  const any = name ?? names[0]; // its steps are those of the replica
  return { name, points: any === undefined ? [] : await source.loadHistory(replica, any, undefined, undefined, POINTS) };
}

type Point = readonly [time: number, value: number | null];

function ratesOf(points: readonly MetricPoint[]): Point[] {
  const longest = longestStep(Float64Array.from(points, ([time]) => time));
  return points.flatMap(([time, step], at) => {
    const [before, first] = points[at - 1] ?? [time, step];
    return time > before && time - before <= longest && step !== null && first !== null && step > first ? [[time, (step - first) / (time - before)] as Point] : [];
  });
}

/** Return the mean of curves over time: of all points in each part of the time that they take. */
export function meanOf(curves: readonly (readonly Point[])[]): Points {
  const points = curves.flat().filter((one): one is [number, number] => one[1] !== null && Number.isFinite(one[1]));
  if (!points.length) return NO_POINTS;
  points.sort(([one], [other]) => one - other);
  const begin = points[0]![0];
  const width = (points.at(-1)![0] - begin) / POINTS || 1;
  const parts = new Map<number, [time: number, value: number, count: number]>();
  for (const [time, value] of points) {
    const key = Math.floor((time - begin) / width);
    const known = parts.get(key) ?? [0, 0, 0];
    parts.set(key, [known[0] + time, known[1] + value, known[2] + 1]);
  }
  const means = [...parts.values()];
  return {
    times: Float64Array.from(means, ([time, , count]) => time / count),
    values: Float64Array.from(means, ([, value, count]) => value / count),
  };
}
