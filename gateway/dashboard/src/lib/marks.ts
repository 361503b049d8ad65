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

/** Return the marks of the commands that some of the replicas have applied, the earliest first. */
export function commandMarks(commands: readonly CommandRun[], concerns: (replica: string) => boolean): CommandMark[] {
  const marks: CommandMark[] = [];
  for (const run of commands) {
    if (!KINDS.has(run.kind)) continue;
    for (const one of run.acknowledgements.values()) {
      if (!one.ok || one.waiting || !concerns(one.replica)) continue;
      const text = `${describeCommand(run.kind, run.params)}${run.by ? `, by ${run.by}` : ''}`;
      marks.push({ time: one.time ?? run.time, text });
      break;
    }
  }
  return marks.reverse();
}
