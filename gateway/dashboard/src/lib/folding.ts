/** Events folded: what many replicas did alike within a minute is one line. */

import { describeEvent, type Described } from './events';
import { isolate, plural, shortName, value } from './format';
import type { WeaverEvent } from './types';

const WINDOW = 60; // seconds between two events of one line, at most
const ANSWERS: ReadonlySet<string> = new Set(['applied', 'refused', 'unanswered']);

/** What several replicas do; the other kinds have the same words for one and for many. */
const MANY: Record<string, string> = {
  running: 'run again',
  paused: 'are paused',
  draining: 'drain',
  stalled: 'take no steps',
  recovering: 'are not connected',
  respawn_wanted: 'need another place',
  config: 'report their configurations',
  devices_changed: 'changed their devices',
  fault_removed: 'have no injected fault any more',
};

/** A line: one event, or several that are alike. */
export interface Fold extends Described {
  /** The newest of them. */
  event: WeaverEvent;
  /** The replicas, the first one first. */
  replicas: string[];
  /** The command that they answered. */
  command: string | null;
  /** A search that finds the replicas. */
  search: string;
}

interface Open {
  events: WeaverEvent[]; // the newest first
  replicas: Set<string>;
}

/** Return the newest lines, the newest first. Events come the oldest first. */
export function foldEvents(events: readonly WeaverEvent[], most: number): Fold[] {
  const told = toldOfRuns(events);
  const lines: Open[] = [];
  const open = new Map<string, Open>();
  for (let at = events.length - 1; at >= 0; at -= 1) {
    const event = events[at]!;
    if (isStart(event) || event.kind === 'run_changed' || isTold(event, told)) continue;
    const key = keyOf(event);
    const known = key === null ? undefined : open.get(key);
    if (known && known.events.at(-1)!.time - event.time <= WINDOW && !known.replicas.has(event.replica!)) {
      known.events.push(event);
      known.replicas.add(event.replica!);
      continue;
    }
    if (lines.length === most) {
      if (key !== null) open.delete(key);
      continue;
    }
    const line = { events: [event], replicas: new Set(event.replica === null ? [] : [event.replica]) };
    lines.push(line);
    if (key !== null) open.set(key, line);
  }
  return lines.map(({ events: found }) => foldOf(found));
}

/** Whether an event says no more than that a process, of whose registration is another event, has begun. */
function isStart(event: WeaverEvent): boolean {
  return event.kind === 'registering' || (event.kind === 'running' && event['from'] === 'registering');
}

const TOGETHER = 15; // seconds between the begin or end of a run and those of its processes

const OF_RUNS: Record<string, string> = { run_began: 'registered', run_ended: 'finished' };

/** Return the times of runs' begins and ends by the kind of their replicas' events and by name. */
function toldOfRuns(events: readonly WeaverEvent[]): Map<string, number[]> {
  const told = new Map<string, number[]>();
  for (const { kind, name, time } of events as readonly (WeaverEvent & { name?: unknown })[]) {
    const of = OF_RUNS[kind];
    if (of === undefined) continue;
    const key = `${of} ${String(name)}`;
    const known = told.get(key);
    if (known) known.push(time);
    else told.set(key, [time]);
  }
  return told;
}

/** Whether the begin or the end of a run says what an event says of one of its replicas. A failure is told all the same. */
function isTold(event: WeaverEvent, told: ReadonlyMap<string, readonly number[]>): boolean {
  if (!told.size || event.replica === null || (event.kind !== 'registered' && event.kind !== 'finished')) return false;
  return told.get(`${event.kind} ${groupOf(event)}`)?.some((time) => Math.abs(time - event.time) <= TOGETHER) ?? false;
}

/** The keys of events that were looked at before: with each new event, all are looked at again. */
const keys = new WeakMap<WeaverEvent, string>();

/** Return the same text for events of one line; null for an event that stands alone. */
function keyOf(event: WeaverEvent): string | null {
  if (event.replica === null) return null;
  let key = keys.get(event);
  if (key === undefined) keys.set(event, (key = madeKey(event)));
  return key;
}

function madeKey(event: WeaverEvent): string {
  const { kind } = event;
  const changed = Object.entries(changesOf(event)).map(([key, one]) => [key, one.new]);
  if (ANSWERS.has(kind)) return JSON.stringify([kind, event['command'], changed, event['reason'] ?? null]);
  return JSON.stringify([kind, groupOf(event), changed, event['ending'] ?? null, event['ended_by'] ?? null, event['reason'] ?? event['why'] ?? null]);
}

/** The name of a replica's group, or else its name without its number. */
function groupOf(event: WeaverEvent): string {
  return String(event['group'] ?? shortName(event.replica!).replace(/[_-]?\d+$/, ''));
}

type Changes = Record<string, { old: unknown; new: unknown }>;

const changesOf = (event: WeaverEvent): Changes => (event['changes'] as Changes | undefined) ?? {};

function foldOf(events: readonly WeaverEvent[]): Fold {
  const event = events[0]!;
  const replicas = events.flatMap((one) => (one.replica === null ? [] : [one.replica])).reverse();
  const command = ANSWERS.has(event.kind) && event['command'] != null ? String(event['command']) : null;
  const one = describeEvent(event);
  const base = { event, replicas, command, tone: one.tone, search: event.replica === null ? '' : groupOf(event) };
  return { ...base, text: events.length === 1 ? one.text : textOf(events) };
}

/** What the replicas of several events did; the words for the replicas are not in it. */
function textOf(events: readonly WeaverEvent[]): string {
  const [event] = events as [WeaverEvent];
  const steps = stepsOf(events);
  if (event.kind === 'applied' && event['do'] === 'update_config' && Object.keys(changesOf(event)).length) {
    const { taken } = event as { taken?: unknown[] };
    return `${taken?.length ? 'changed' : 'applied'} ${changedBy(events)}${steps}`;
  }
  const { reason } = event;
  const because = reason ? `: ${isolate(String(reason))}` : '';
  if (event.kind === 'registered' || event.kind === 'reconnected') {
    const hosts = new Set(events.map((one) => String(one['host'] ?? '')));
    return `${event.kind} on ${hosts.size === 1 ? isolate([...hosts][0]! || 'a host') : plural(hosts.size, 'host')}${steps}`;
  }
  const many = MANY[event.kind];
  if (many) return `${many}${because}${event.kind === 'config' ? `: ${changedBy(events)}` : ''}`;
  return `${describeEvent({ ...event, step: null }).text}${steps}`;
}

function changedBy(events: readonly WeaverEvent[]): string {
  const parts = Object.entries(changesOf(events[0]!)).map(([key, { old, new: now }]) => {
    const same = events.every((one) => JSON.stringify(changesOf(one)[key]?.old) === JSON.stringify(old));
    return isolate(old == null ? `${key} = ${value(now)}` : same ? `${key} ${value(old)} → ${value(now)}` : `${key} → ${value(now)}`);
  });
  return parts.join(', ');
}

function stepsOf(events: readonly WeaverEvent[]): string {
  const steps = events.map((one) => one['step']).filter((one): one is number => typeof one === 'number');
  if (!steps.length) return '';
  const [least, most] = [Math.min(...steps), Math.max(...steps)];
  return least === most ? ` at step ${least}` : ` at steps ${least} to ${most}`;
}
