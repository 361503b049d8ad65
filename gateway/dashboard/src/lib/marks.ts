/** Marks of commands on curves. */

import { describeCommand, type CommandRun } from './commands';

const KINDS: ReadonlySet<string> = new Set([
  'update_config',
  'pause',
  'resume',
  'stop',
  'drain',
  'deactivate_device',
  'reactivate',
  'inject',
]);

export interface CommandMark {
  time: number;
  text: string;
}

const MOST = 100; // commands that are drawn on the curves of jobs

/** Return the marks of each job's curves: those of the newest commands that some replica of the job has applied. */
export function marksOfJobs(commands: readonly CommandRun[], jobOf: (replica: string) => string | undefined): Map<string, CommandMark[]> {
  const found = new Map<string, CommandMark[]>();
  for (const run of commands.slice(0, MOST).reverse()) {
    if (!KINDS.has(run.kind)) continue;
    const times = new Map<string, number>();
    for (const one of run.acknowledgements.values()) {
      const job = one.ok && !one.waiting ? jobOf(one.replica) : undefined;
      if (job !== undefined && !times.has(job)) times.set(job, one.time ?? run.time);
    }
    for (const [job, time] of times) {
      const marks = found.get(job);
      if (marks) marks.push({ time, text: textOf(run) });
      else found.set(job, [{ time, text: textOf(run) }]);
    }
  }
  return found;
}

function textOf(run: CommandRun): string {
  return `${describeCommand(run.kind, run.params)}${run.by ? `, by ${run.by}` : ''}`;
}

/** Return the marks of the commands that some of the replicas have applied, the earliest first. */
export function commandMarks(commands: readonly CommandRun[], concerns: (replica: string) => boolean): CommandMark[] {
  const marks: CommandMark[] = [];
  for (const run of commands) {
    if (!KINDS.has(run.kind)) continue;
    for (const one of run.acknowledgements.values()) {
      if (!one.ok || one.waiting || !concerns(one.replica)) continue;
      marks.push({ time: one.time ?? run.time, text: textOf(run) });
      break;
    }
  }
  return marks.reverse();
}
