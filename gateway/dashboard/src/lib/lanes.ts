/** Lanes: of what the steps of replicas consist, by their metrics `time/…`, and who waits for whom. */

import { isolate, percent, shortName, toNumber } from './format';
import { grouped } from './sets';
import type { Replica } from './store/replicas';
import { ENDED, type MetricValue } from './types';

const PREFIX = 'time/';
const STEP = 'step';
const TRAINER_STEP = 'trainer_step';
/** A trainer reports the share of each of its parts, too: by these a part is known in reports of the orchestrator. */
const OF_TRAINER = 'perf/trainer/step_time_ratio/';
const ROUNDING = 1.01; // parts that are longer than their step by less fit into it

type Metrics = Readonly<Record<string, MetricValue>>;

/** The times of a step, in seconds. */
export interface StepTimes {
  /** The whole step; never shorter than its parts together. */
  readonly whole: number;
  readonly parts: ReadonlyMap<string, number>;
}

export const isWait = (part: string): boolean => part.startsWith('wait_');

/**
 * Return the times of a step by the newest metrics of a replica; null if none of them is a time.
 *
 * `time/step`, or else `time/trainer_step`, is the whole step. A value that is missing, negative or not finite is left out.
 *
 * @param before the metrics with the step before. The weaver keeps the last value of each metric: a part that is as it was
 *   before, and does not fit into the step, is not of this step.
 */
export function stepTimes(metrics: Metrics, before: Metrics | null = null): StepTimes | null {
  const own = PREFIX + STEP in metrics;
  const parts = new Map<string, number>();
  let given = 0;
  let sum = 0;
  let found = false;
  for (const key in metrics) {
    if (!key.startsWith(PREFIX)) continue;
    found = true;
    const name = key.slice(PREFIX.length);
    const seconds = toNumber(metrics[key]);
    if (seconds === null || !(seconds > 0 && seconds < Infinity)) continue;
    if (name === STEP || name === TRAINER_STEP) {
      if ((name === STEP) === own) given = seconds;
    } else if (!own || !(OF_TRAINER + name in metrics)) {
      parts.set(name, seconds);
      sum += seconds;
    }
  }
  if (!found) return null;
  if (before && given && sum > given * ROUNDING)
    for (const [name, seconds] of parts)
      if (before[PREFIX + name] === seconds) {
        parts.delete(name);
        sum -= seconds;
      }
  return { whole: Math.max(given, sum), parts };
}

/** Return the mean times of some steps. */
export function meanTimes(steps: readonly StepTimes[]): StepTimes {
  const parts = new Map<string, number>();
  let whole = 0;
  for (const one of steps) {
    whole += one.whole / steps.length;
    for (const [name, seconds] of one.parts) parts.set(name, (parts.get(name) ?? 0) + seconds / steps.length);
  }
  return { whole, parts };
}

/** Return the share of a step that is waiting, from 0 to 1. */
export function waitingShare({ whole, parts }: StepTimes): number {
  let waited = 0;
  for (const [name, seconds] of parts) if (isWait(name)) waited += seconds;
  return whole > 0 ? Math.min(1, waited / whole) : 0;
}

/** Return the seconds of a step that are in none of its parts. */
export function unaccounted({ whole, parts }: StepTimes): number {
  let rest = whole;
  for (const seconds of parts.values()) rest -= seconds;
  return Math.max(0, rest);
}

export const MOST_LANES = 16;
const MOST_ASKED = 32; // further replicas, of which the newest metrics are asked for in turn
const STAYS = 0.05; // more of its step has a replica to wait than one that has a lane, to take its place

/** A replica with times. */
export interface Reporter {
  replica: Replica;
  /** The mean of its newest steps. */
  mean: StepTimes;
  /** The share of waiting in it. */
  share: number;
}

const reporterOf = (replica: Replica, mean: StepTimes): Reporter => ({ replica, mean, share: waitingShare(mean) });

/** The reporters by their metrics: of thousands of replicas only a few have others when it is looked again. */
const known = new WeakMap<Metrics, Reporter | null>();

function lastReporter(replica: Replica): Reporter | null {
  let found = known.get(replica.metrics);
  if (found === undefined) {
    const times = stepTimes(replica.metrics);
    known.set(replica.metrics, (found = times && reporterOf(replica, times)));
  }
  return found;
}

export interface Survey {
  /** The replicas that report times. */
  reporters: Reporter[];
  /** Those that have lanes, because they wait longest, in the order of all replicas. */
  lanes: Reporter[];
  /** Further replicas whose newest metrics are needed now. */
  asked: string[];
}

/**
 * Look through living replicas for those that report times.
 *
 * @param stepsOf the newest steps of a replica that has a lane; those of others are known by their last metrics
 * @param turn how often it was looked before: of replicas without lanes, others are asked for each time
 */
export function survey(
  replicas: readonly Replica[],
  stepsOf: (id: string) => readonly StepTimes[],
  before: Survey | null,
  turn: number,
): Survey {
  const had = new Set(before?.lanes.map((one) => one.replica.id));
  const living = replicas.filter((one) => !ENDED.has(one.state));
  const reporters: Reporter[] = [];
  const keys = new Float64Array(living.length);
  for (const replica of living) {
    const stays = had.has(replica.id);
    const steps = stays ? stepsOf(replica.id) : [];
    const reporter = steps.length ? reporterOf(replica, meanTimes(steps)) : lastReporter(replica);
    if (reporter) keys[reporters.push(reporter) - 1] = reporter.share + (stays ? STAYS : 0);
  }
  const lanes = longest(reporters, keys.subarray(0, reporters.length));
  const drawn = new Set(lanes.map((one) => one.replica.id));
  const others = living.filter((one) => !drawn.has(one.id));
  const first = others.length > MOST_ASKED ? (turn * MOST_ASKED) % others.length : 0;
  return { reporters, lanes, asked: others.slice(first, first + MOST_ASKED).map((one) => one.id) };
}

/** Return the reporters with the largest keys, in their order. */
function longest(reporters: readonly Reporter[], keys: Float64Array): Reporter[] {
  const sorted = keys.slice().sort();
  const least = sorted.at(-MOST_LANES) ?? -1;
  let ties = MOST_LANES - sorted.slice(-MOST_LANES).filter((one) => one > least).length;
  return reporters.filter((_, at) => keys[at]! > least || (keys[at] === least && ties-- > 0));
}

const NOTABLE = 0.1; // of a step
const MOST_CLAUSES = 2;
const SAMPLE = 100; // replicas of a job by which it is told for what they wait
const LONGEST_NAME = 60; // characters
const OBJECTS = new Map([['batch', 'batches'], ['policy', 'weights']]);

/** Return the sentence that says which jobs' replicas wait, and for what. */
export function sentenceOf(reporters: readonly Reporter[]): string {
  const waiting = [...grouped(reporters, (one) => one.replica.job).values()]
    .map((members) => ({ members, share: members.reduce((sum, one) => sum + one.share, 0) / members.length }))
    .filter(({ share }) => share > NOTABLE)
    .sort((one, other) => other.share - one.share)
    .slice(0, MOST_CLAUSES);
  if (!waiting.length) return `Nobody waits for more than ${percent(NOTABLE)} of a step.`;
  const text = waiting.map(({ members, share }) => `${subjectOf(members)} ${percent(share)} of ${members.length > 1 ? 'their' : 'its'} step for ${objectOf(members)}`);
  return `${text.join(', and ').replace(/^the /, 'The ')}.`;
}

/** Return who waits, with the verb: `the trainers wait`, `the orchestrator waits`, `train_0 waits`. */
function subjectOf(members: readonly Reporter[]): string {
  const { id, group } = members[0]!.replica;
  const name = isolate((members.length > 1 ? group : shortName(id)).slice(0, LONGEST_NAME));
  if (members.length === 1) return `${/\d$/.test(name) ? '' : 'the '}${name} waits`;
  return /[eo]rs?$/.test(name) ? `the ${name.replace(/s?$/, 's')} wait` : `the replicas of ${name || 'no group'} wait`;
}

/** Return what is waited for longest, by some of those that wait. */
function objectOf(members: readonly Reporter[]): string {
  const some = members.filter((one) => one.share > NOTABLE).slice(0, SAMPLE);
  const waits = [...meanTimes(some.map((one) => one.mean)).parts].filter(([name]) => isWait(name));
  const [name] = waits.reduce((one, other) => (other[1] > one[1] ? other : one));
  const what = name.replace(/^wait_(for_)?/, '').replaceAll('_', ' ').slice(0, LONGEST_NAME);
  return OBJECTS.get(what) ?? (isolate(what) || 'something');
}

const MOST_KINDS = 7; // that have colours of their own

/** What the parts of other names are, of which there are too many. */
export const OTHERS = 'other parts';

/** Return the names of the parts that have colours, in alphabetical order: those that take longest. */
export function kindsOf(means: readonly StepTimes[]): string[] {
  const all = [...meanTimes(means).parts].sort(([, one], [, other]) => other - one);
  const kinds = all.slice(0, MOST_KINDS).map(([name]) => name).sort();
  return all.length > MOST_KINDS ? [...kinds, OTHERS] : kinds;
}

/** Return the seconds of each kind in a step, and those that are in no part. */
export function secondsOf(step: StepTimes, kinds: readonly string[]): number[] {
  const seconds = kinds.map((kind) => step.parts.get(kind) ?? 0);
  if (kinds.at(-1) === OTHERS) for (const [name, one] of step.parts) if (!kinds.includes(name)) seconds[kinds.length - 1]! += one;
  return [...seconds, unaccounted(step)];
}

/** The steps of a lane. */
export const LANE_STEPS = 10;
/** The size of a lane's picture, which is stretched to the width that there is. */
export const LANE_WIDTH = 1000;
export const LANE_HEIGHT = 20;
const GAP = 4; // between two steps

/**
 * Return, for each kind and for what is in no part, the path of its boxes in a lane. The newest step ends on the right.
 *
 * @param scale seconds that are as long as the lane
 */
export function lanePaths(steps: readonly StepTimes[], kinds: readonly string[], scale: number): string[] {
  const paths = Array.from({ length: kinds.length + 1 }, () => '');
  const perSecond = (LANE_WIDTH - GAP * (LANE_STEPS - 1)) / scale;
  let right = LANE_WIDTH;
  for (const step of steps.toReversed()) {
    let x = right - step.whole * perSecond;
    right = x - GAP;
    secondsOf(step, kinds).forEach((seconds, at) => {
      const wide = seconds * perSecond;
      if (wide >= 0.05) paths[at] += `M${x.toFixed(1)} 0h${wide.toFixed(1)}v${LANE_HEIGHT}h-${wide.toFixed(1)}z`;
      x += wide;
    });
  }
  return paths;
}

/** Return a round number of seconds that no lane is longer than. */
export function scaleOf(lanes: readonly (readonly StepTimes[])[]): number {
  const longest = Math.max(0, ...lanes.map((steps) => steps.reduce((sum, one) => sum + one.whole, 0)));
  if (longest === 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(longest));
  return unit * [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((one) => one * unit >= longest * 0.999)!;
}
