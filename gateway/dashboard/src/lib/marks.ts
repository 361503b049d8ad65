/** Marks of commands on curves. */

import { describeCommand, type CommandRun } from './commands';

const KINDS: ReadonlySet<string> = new Set([
  'update_config',
  'pause',
  'resume',
  'stop',
  'drain',
  'save',
  'evaluate',
  'deactivate_device',
  'reactivate',
  'inject',
]);

export interface CommandMark {
  time: number;
  text: string;
}

const MOST = 100; // commands that are drawn on the curves of jobs

/** The jobs that a command has struck, and when: of as many of its answers as were looked at. */
const seen = new WeakMap<ReadonlySet<string>, { answers: number; times: Map<string, number> }>();

/** Return the marks of each job's curves: those of the newest commands that some replica of the job has applied. */
export function marksOfJobs(commands: readonly CommandRun[], jobOf: (replica: string) => string | undefined): Map<string, CommandMark[]> {
  const found = new Map<string, CommandMark[]>();
  for (const run of commands.slice(0, MOST).reverse()) {
    if (!KINDS.has(run.kind)) continue;
    for (const [job, time] of timesOf(run, jobOf)) {
      const marks = found.get(job);
      if (marks) marks.push({ time, text: textOf(run) });
      else found.set(job, [{ time, text: textOf(run) }]);
    }
  }
  return found;
}

function timesOf(run: CommandRun, jobOf: (replica: string) => string | undefined): ReadonlyMap<string, number> {
  const known = seen.get(run.applied) ?? { answers: 0, times: new Map<string, number>() };
  let at = 0;
  for (const replica of run.applied) {
    at += 1;
    if (at <= known.answers) continue;
    const job = jobOf(replica);
    if (job !== undefined && !known.times.has(job)) known.times.set(job, run.acknowledgements.get(replica)?.time ?? run.time);
  }
  known.answers = run.applied.size;
  seen.set(run.applied, known);
  return known.times;
}

function textOf(run: CommandRun): string {
  return `${describeCommand(run.kind, run.params)}${run.by ? `, by ${run.by}` : ''}`;
}

/** Return the marks of the commands that a replica has applied, the earliest first. */
export function commandMarks(commands: readonly CommandRun[], replica: string): CommandMark[] {
  const marks: CommandMark[] = [];
  for (const run of commands) {
    const one = KINDS.has(run.kind) ? run.acknowledgements.get(replica) : undefined;
    if (one?.ok && !one.waiting) marks.push({ time: one.time ?? run.time, text: textOf(run) });
  }
  return marks.reverse();
}
