/** Time accounting: reasons, their colours and shares. */

import type { FaultRecord, GoodputRecord } from './types';

export const REASONS = ['compute', 'lost', 'checkpoint', 'waiting', 'detection', 'respawn', 'idle'] as const;

export const REASON_TEXTS: Record<string, string> = {
  compute: 'steps that count',
  lost: 'steps that were repeated, that raised, or that died with their process',
  checkpoint: 'checkpoints',
  waiting: 'from the start to the first step, for a pause, for peers',
  detection: "from the last sign of a process to the notice of its death",
  respawn: 'until another process had the place',
  idle: 'everything else',
};

export function reasonColour(reason: string): string {
  return (REASONS as readonly string[]).includes(reason) ? `r-${reason}` : 'r-other';
}

/** Return the reasons of some times with their seconds: those of Loom in their order, then the training's own. */
export function byReason(seconds: Readonly<Record<string, number>>): [string, number][] {
  const own = Object.keys(seconds).filter((one) => !(REASONS as readonly string[]).includes(one));
  return [...REASONS, ...own.sort()].flatMap((one): [string, number][] => (seconds[one]! > 0 ? [[one, seconds[one]!]] : []));
}

/** Return a text about the time that was not spent on steps that count. */
export function restOf(seconds: Readonly<Record<string, number>>): string {
  const [largest] = byReason(seconds)
    .filter(([reason]) => reason !== 'compute')
    .sort(([, one], [, other]) => other - one);
  return largest ? `most of the rest: ${largest[0]}` : 'nothing was lost';
}

export interface Span {
  from: number;
  until: number;
  shares: [string, number][];
}

/** Return the share of each reason between two points of a job's timeline. */
export function courseShares(record: GoodputRecord): Span[] {
  const spans: Span[] = [];
  let before = { time: record.since, seconds: {} as Record<string, number> };
  for (const point of record.course) {
    const spent: Record<string, number> = {};
    let whole = 0;
    for (const [reason, seconds] of Object.entries(point.seconds)) {
      const fresh = Math.max(0, seconds - (before.seconds[reason] ?? 0));
      if (fresh > 0) {
        spent[reason] = fresh;
        whole += fresh;
      }
    }
    if (whole > 0 && point.time > before.time)
      spans.push({
        from: before.time,
        until: point.time,
        shares: byReason(spent).map(([reason, seconds]) => [reason, seconds / whole]),
      });
    before = point;
  }
  return spans;
}

export interface FaultTimes {
  detection: number;
  respawn: number | null;
  waiting: number | null;
  recovery: number | null;
}

export function faultTimes(fault: FaultRecord): FaultTimes {
  const { time, detected, registered, stepped } = fault;
  return {
    detection: detected - time,
    respawn: registered === null ? null : registered - detected,
    waiting: registered === null || stepped === null ? null : stepped - registered,
    recovery: stepped === null ? null : stepped - time,
  };
}
