/** The past of a job's curves, from the curves of its run: a page sees only what comes while it is open. */

import { loadCurves } from './runs.svelte';
import { longestStep, lossName, NO_POINTS, pointsOf, type Points } from './series';
import type { CurveSection, Run } from './types';

export interface Past {
  /** The metric that is taken for the loss; null if there is none like it. */
  name: string | null;
  losses: Points;
  rates: Points;
}

export const NO_PAST: Past = { name: null, losses: NO_POINTS, rates: NO_POINTS };

const POINTS = 300;

/** Load the past of the curves of a run: means over its ranks. */
export async function loadPast(run: Run, load = loadCurves): Promise<Past> {
  const names = Object.keys(run.summary);
  const name = lossName(names);
  const any = name ?? names[0]; // its steps are those of the run
  if (any === undefined) return NO_PAST;
  const { curves } = await load(run.id, any, { by: 'time', points: POINTS, ranks: run.ranks > 1 ? 'band' : 'one' });
  const sections = curves[0]?.sections ?? [];
  return {
    name,
    losses: name === null ? NO_POINTS : pointsOf(sections.flatMap(({ time, value }) => time.map((one, at) => [one, value[at] ?? null] as const))),
    rates: pointsOf(sections.flatMap(ratesOf)),
  };
}

const LEAST = 1; // seconds for which steps are counted: a mean over ranks has its steps at uneven times

function ratesOf({ time, step }: CurveSection): [time: number, value: number][] {
  const longest = longestStep(Float64Array.from(time));
  const rates: [number, number][] = [];
  let from = 0;
  for (let at = 1; at < time.length; at += 1) {
    const passed = time[at]! - time[from]!;
    if (passed < LEAST) continue;
    const made = (step[at] ?? NaN) - (step[from] ?? NaN);
    if (time[at]! - time[at - 1]! <= longest && made > 0) rates.push([time[at]!, made / passed]);
    from = at;
  }
  return rates;
}
