/** The marks of a run's timeline: as sentences, at their places on an axis, and as flags over a curve. */

import { describeCommand } from './commands';
import { count, isolate, plural, shortName, value } from './format';
import type { Tone } from './events';
import { interpolate, stepAt, type Axis, type Counted, type Range } from './sections';
import type { Change, CurveSection, RunMark } from './types';

const text = (mark: RunMark, name: string): string => (mark[name] == null ? '' : isolate(String(mark[name])));
const amount = (mark: RunMark, name: string): number => Number(mark[name] ?? 0);

export function changesOf(mark: RunMark): Record<string, Change> {
  return (mark['changes'] as Record<string, Change> | undefined) ?? {};
}

/** Return a text that only this mark of a run has: marks of one event have other kinds. */
export function keyOf({ kind, event }: RunMark): string {
  return `${kind} ${event}`;
}

/** Return a short sentence for a mark. */
export function titleOf(mark: RunMark): string {
  const several = plural(amount(mark, 'count'), 'process', 'processes');
  const others = amount(mark, 'count') - 1;
  const who = `${shortName(text(mark, 'replica')) || 'a process'}${others > 0 ? ` and ${plural(others, 'other')}` : ''}`;
  const why = text(mark, 'reason') ? `, ${text(mark, 'reason')}` : '';
  switch (mark.kind) {
    case 'command':
      return commandTitle(mark);
    case 'started':
    case 'joined':
    case 'restarted':
      return `${mark.kind}: ${several}`;
    case 'stalled':
    case 'crashed':
    case 'evicted':
    case 'lost':
      return `${mark.kind}: ${who}${why}`;
    case 'ended':
      return `the run ended: ${text(mark, 'state')}${text(mark, 'by') ? ` by ${text(mark, 'by')}` : ''}`;
    default: {
      const said = text(mark, 'text') || text(mark, 'reason');
      return `${mark.kind.replaceAll('_', ' ')}${said ? `: ${said}` : ''}`;
    }
  }
}

function commandTitle(mark: RunMark): string {
  const changes = Object.entries(changesOf(mark));
  const [done, params] = [String(mark['do']), (mark['params'] as Record<string, unknown> | undefined) ?? {}];
  if (done === 'update_config' && changes.length && amount(mark, 'applied'))
    return changes.map(([key, one]) => isolate(`${key} ${one.old == null ? '' : `${value(one.old)} `}→ ${value(one.new)}`)).join(', ');
  const refused = !amount(mark, 'applied') && amount(mark, 'refused') ? ' refused' : '';
  return `${describeCommand(done, params)}${refused}`;
}

/** Return what became of a mark's command: how many ranks applied it at which steps, how many refused it and why. */
export function acknowledgementOf(mark: RunMark): string {
  const [applied, refused] = [amount(mark, 'applied'), amount(mark, 'refused')];
  const last = mark['last_step'] == null ? mark.step : amount(mark, 'last_step');
  const at = mark.step === null ? '' : last !== null && last > mark.step ? ` at steps ${count(mark.step)} to ${count(last)}` : ` at step ${count(mark.step)}`;
  const parts = [];
  if (applied) parts.push(`${plural(applied, 'rank')} applied it${at}`);
  if (refused) parts.push(`${plural(refused, 'rank')} refused it${text(mark, 'reason') ? `: ${text(mark, 'reason')}` : ''}`);
  return parts.join('; ') || 'no rank has answered yet';
}

export function toneOf(mark: RunMark): Tone {
  if (mark.kind === 'command') {
    if (mark['do'] === 'inject') return 'warning';
    return amount(mark, 'applied') ? 'command' : 'warning';
  }
  if (mark.kind === 'crashed' || mark.kind === 'lost') return 'bad';
  if (mark.kind === 'ended') return ['crashed', 'lost'].includes(String(mark['state'])) ? 'bad' : 'plain';
  return ['started', 'joined'].includes(mark.kind) ? 'plain' : 'warning';
}

/** A mark at its place on the axis. */
export interface Placed {
  mark: RunMark;
  x: number;
}

/**
 * Return marks at their places on an axis. A mark without a step is where the curve was at its time.
 *
 * @param sections of the curve of one replica, for times and steps
 */
export function placeMarks(marks: readonly RunMark[], axis: Axis, sections: readonly CurveSection[], counted: Counted | null): Placed[] {
  const found: Placed[] = [];
  for (const mark of marks) {
    const step = mark.step ?? stepAt(sections, mark.time);
    const x = axis === 'time' ? mark.time : step === null ? NaN : axis === 'step' ? step : counted ? interpolate(counted.steps, counted.amounts, step) : NaN;
    if (Number.isFinite(x)) found.push({ mark, x });
  }
  return found.sort((one, other) => one.x - other.x);
}

/** A flag over the curve, for one mark or for several that are too near to each other. */
export interface Flag {
  marks: RunMark[];
  /** Pixels from the left of the curve. */
  left: number;
  /** Pixels that there are for a text; 0 if there is room for a number only. */
  room: number;
  /** Whether the text is to the left of the place. */
  back: boolean;
}

const NEAR = 26; // pixels between two flags
const LEAST = 64; // pixels of a text that can be read
const WIDEST = 280;
const BETWEEN = 6; // pixels between two flags, at least
const LETTER = 7; // pixels of a letter, about
const PADDING = 16;
const SMALLEST = 20; // pixels of a flag without words
const ORDER: readonly Tone[] = ['command', 'bad', 'warning', 'plain', 'good'];

/** Return marks with those before the first point, or after the last one, at the ends of the axis. */
export function within(placed: readonly Placed[], [from, until]: Range): Placed[] {
  return placed.map(({ mark, x }) => ({ mark, x: Math.min(until, Math.max(from, x)) }));
}

/** Return the flags for marks, of which those outside of the part that is shown are left out. */
export function flagsOf(placed: readonly Placed[], [from, until]: Range, width: number): Flag[] {
  const flags: Flag[] = [];
  for (const { mark, x } of placed) {
    if (x < from || x > until) continue;
    const left = ((x - from) / (until - from || 1)) * width;
    const last = flags.at(-1);
    if (last && left - last.left < NEAR) last.marks.push(mark);
    else flags.push({ marks: [mark], left, room: 0, back: false });
  }
  // The words of what somebody did come first: of what is left the others take what they need.
  const taken = flags.map(({ left }): [number, number] => [left, left + SMALLEST]);
  const ordered = flags.map((flag, at) => ({ flag, at, chief: chiefOf(flag.marks) })).sort((one, other) => ORDER.indexOf(toneOf(one.chief)) - ORDER.indexOf(toneOf(other.chief)));
  for (const { flag, at, chief } of ordered) {
    const needed = Math.min(WIDEST, PADDING + LETTER * titleOf(chief).length + (flag.marks.length > 1 ? PADDING : 0));
    const right = Math.min(width, ...taken.filter(([from], other) => other !== at && from >= flag.left).map(([from]) => from)) - flag.left - BETWEEN;
    const before = flag.left - Math.max(0, ...taken.filter(([, until], other) => other !== at && until <= flag.left).map(([, until]) => until)) - BETWEEN;
    flag.back = right < needed && before > right && before >= LEAST;
    const room = Math.min(flag.back ? before : right, WIDEST);
    flag.room = room < LEAST ? 0 : room;
    const used = flag.room ? Math.min(flag.room, needed) : SMALLEST;
    taken[at] = flag.back ? [flag.left - used, flag.left] : [flag.left, flag.left + used];
  }
  return flags;
}

/** Return the most telling mark of some that share a flag: a command, before a failure, before the rest. */
export function chiefOf(marks: readonly RunMark[]): RunMark {
  return marks.toSorted((one, other) => ORDER.indexOf(toneOf(one)) - ORDER.indexOf(toneOf(other)))[0]!;
}
