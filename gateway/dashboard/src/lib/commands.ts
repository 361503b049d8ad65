/** The log of commands: those of this page, with their acknowledgements, and those that events tell of. */

import { isolate } from './format';
import type { Acknowledgement, AcknowledgementMessage, Change, CommandKind, Target, WeaverEvent } from './types';

/** `sent`: nobody has answered. `accepted`: the weaver has the command. `error`: it was refused as a whole. */
export type Phase = 'sent' | 'accepted' | 'done' | 'error';

export interface CommandRun {
  id: string;
  kind: string;
  params: Record<string, unknown>;
  target: Target;
  by: string;
  time: number;
  /** Whether this page gave the command. */
  mine: boolean;
  phase: Phase;
  replicas: string[];
  /** The number of replicas that the command is for. */
  total: number;
  acknowledgements: Map<string, Acknowledgement>;
  /** The replicas by what became of it, in the order of their answers. */
  refused: Set<string>;
  pending: Set<string>;
  applied: Set<string>;
  /** Those of `applied` whose program took all of it to apply itself. */
  taken: Set<string>;
  /** Why the first one refused it. */
  why: string | null;
  /** The changes that take it back, by the old values. */
  undo: Map<string, { target: string[]; params: Record<string, unknown> }>;
  error: string | null;
  /** Id of the event of the command; null until it came. */
  event: number | null;
  cause: number | null;
}

export interface Order {
  kind: CommandKind;
  /** Undefined: those on the devices that the parameters name. */
  target: Target | undefined;
  params: Record<string, unknown>;
}

const KEPT = 1000;
const KEPT_ANSWERS = 100_000; // of all commands together
const REFUSED = { ok: false, step: null, changes: {}, refused: {}, waiting: false, evidence: {}, taken: [] };
const ANSWERS: ReadonlySet<string> = new Set(['applied', 'refused', 'unanswered']);

export class CommandLog {
  readonly runs = new Map<string, CommandRun>();
  #aliases = new Map<string, string>(); // the page's ids of commands that the weaver knows by another id

  get(id: string): CommandRun | undefined {
    return this.runs.get(this.#aliases.get(id) ?? id);
  }

  /** The commands, the newest first. */
  list(): CommandRun[] {
    return [...this.runs.values()].sort((one, other) => other.time - one.time);
  }

  add(
    id: string,
    kind: string,
    target: Target,
    params: Record<string, unknown>,
    by: string,
    time: number,
    mine = true,
  ): CommandRun {
    const run: CommandRun = {
      id,
      kind,
      params,
      target,
      by,
      time,
      mine,
      phase: 'sent',
      replicas: [],
      total: 0,
      acknowledgements: new Map(),
      refused: new Set(),
      pending: new Set(),
      applied: new Set(),
      taken: new Set(),
      why: null,
      undo: new Map(),
      error: null,
      event: null,
      cause: null,
    };
    this.runs.set(id, run);
    this.#forget();
    return run;
  }

  clear(): void {
    this.runs.clear();
    this.#aliases.clear();
  }

  accept(id: string, command: string | null, replicas: string[]): void {
    const run = this.get(id);
    if (!run) return;
    if (command && command !== run.id) {
      const heard = this.runs.get(command);
      this.runs.delete(run.id);
      this.#aliases.set(id, command);
      run.id = command;
      if (heard) {
        run.event = heard.event;
        for (const one of heard.acknowledgements.values()) put(run, one);
      }
      this.runs.set(command, run);
    }
    run.replicas = replicas;
    run.total = replicas.length;
    for (const one of replicas) if (!run.acknowledgements.has(one)) run.pending.add(one);
    if (run.phase === 'sent') run.phase = 'accepted';
  }

  acknowledge(message: AcknowledgementMessage, time: number): void {
    const run = this.get(message.id);
    if (!run) return;
    put(run, { ...readAcknowledgement(message, run.params), time: message.waiting ? null : time });
  }

  done(id: string): void {
    const run = this.get(id);
    if (run && run.phase !== 'error') run.phase = 'done';
  }

  fail(id: string, message: string): void {
    const run = this.get(id);
    if (!run || run.phase === 'done') return;
    run.phase = 'error';
    run.error = message;
  }

  /** Take an event about a command; return whether it was one. */
  take(event: WeaverEvent): boolean {
    if (event.kind === 'policy') this.#policy(event);
    else if (event.kind === 'command') this.#given(event);
    else if (ANSWERS.has(event.kind) && event.replica !== null) this.#answered(event);
    else return false;
    return true;
  }

  #given(event: WeaverEvent): void {
    const id = String(event['command']);
    const target = event['target'] as Target;
    const run = this.runs.get(id) ?? this.add(id, String(event['do']), target, {}, '', event.time, false);
    if (run.phase === 'sent') run.phase = 'accepted';
    run.event = event.id;
    run.cause = event.cause ?? null;
    run.by = String(event['by'] ?? '');
    run.time = event.time;
    run.params = (event['params'] as Record<string, unknown> | undefined) ?? {};
    run.total = Number(event['replicas'] ?? run.total) - Number(event['refused_more'] ?? 0);
    // Who refuses at once, as one that has ended does, has no event of its own.
    const refused = (event['refused'] as Record<string, string> | undefined) ?? {};
    for (const replica in refused) put(run, { ...REFUSED, replica, reason: refused[replica]!, time: event.time });
    settle(run);
  }

  #answered(event: WeaverEvent): void {
    const run = this.runs.get(String(event['command']));
    if (!run) return;
    put(run, {
      replica: event.replica!,
      ok: event.kind === 'applied',
      step: (event['step'] as number | null | undefined) ?? null,
      changes: (event['changes'] as Record<string, Change> | undefined) ?? {},
      refused: (event['refused'] as Record<string, string> | undefined) ?? {},
      reason: (event['reason'] as string | null | undefined) ?? null,
      waiting: false,
      evidence: (event['evidence'] as Record<string, unknown> | undefined) ?? {},
      taken: (event['taken'] as string[] | undefined) ?? [],
      time: event.time,
    });
  }

  #policy(event: WeaverEvent): void {
    const { group, action, by } = event as unknown as { group: string; action: string; by: string };
    const id = `policy-${event.id}`;
    if (this.runs.has(id)) return;
    const run = this.add(id, 'policy', group, { action }, by, event.time, false);
    Object.assign(run, { phase: 'done', event: event.id });
  }

  #forget(): void {
    let answers = 0;
    for (const run of this.runs.values()) answers += run.acknowledgements.size;
    for (const [id, run] of this.runs) {
      if (this.runs.size <= KEPT && answers <= KEPT_ANSWERS) return;
      if (run.phase === 'sent') continue;
      this.runs.delete(id);
      answers -= run.acknowledgements.size;
    }
  }
}

function put(run: CommandRun, one: Acknowledgement): void {
  const { replica } = one;
  const before = run.acknowledgements.get(replica);
  const answered = before !== undefined && !before.waiting;
  if (answered && one.waiting) return;
  run.acknowledgements.set(replica, answered ? { ...one, time: before.time ?? one.time } : one);
  run.pending.delete(replica);
  run.refused.delete(replica);
  run.taken.delete(replica);
  if (one.waiting) run.pending.add(replica);
  else if (one.ok) {
    run.applied.add(replica);
    if (onlyTaken(one)) run.taken.add(replica);
    if (!answered) noteOld(run, one);
  } else {
    run.applied.delete(replica);
    run.refused.add(replica);
    run.why ??= one.reason ?? Object.values(one.refused)[0] ?? '';
  }
  settle(run);
}

/** Return whether nothing of a command was applied by the threadlet: the program took it, and says what comes of it. */
export function onlyTaken({ taken, changes }: Pick<Acknowledgement, 'taken' | 'changes'>): boolean {
  return taken.length > 0 && taken.length >= Object.keys(changes).length;
}

/** Return what the replicas that did not refuse a command made of it. */
export function outcomeOf(run: CommandRun): string {
  if (!run.taken.size) return 'applied';
  return run.taken.size === run.applied.size ? 'taken by the program' : 'applied or taken by the program';
}

/** Return the values that take changes back, as far as it is known what was before. */
export function formerValues(changes: Readonly<Record<string, Change>>): Record<string, unknown> {
  const found: Record<string, unknown> = {};
  for (const [key, { old, back }] of Object.entries(changes)) {
    if (back) Object.assign(found, back);
    else if (old != null) found[key] = old;
  }
  return found;
}

/** Note the values that the replica had before. */
function noteOld(run: CommandRun, { replica, changes }: Acknowledgement): void {
  const params = formerValues(changes);
  const text = JSON.stringify(params);
  if (text === '{}') return;
  const known = run.undo.get(text);
  if (known) known.target.push(replica);
  else run.undo.set(text, { target: [replica], params });
}

/** Commands of others have no message `done`: they are done when each replica has answered. */
function settle(run: CommandRun): void {
  if (run.mine || run.phase === 'error') return;
  if (run.total > 0 && run.applied.size + run.refused.size >= run.total) run.phase = 'done';
}

/** Return the replicas of a command from one place to another: those that refused it, that have not answered, that applied it. */
export function replicasOf(run: CommandRun, from: number, to: number): string[] {
  const found: string[] = [];
  let passed = 0;
  for (const part of [run.refused, run.pending, run.applied]) {
    if (passed + part.size > from)
      for (const one of part) {
        if (passed >= to) return found;
        if (passed >= from) found.push(one);
        passed += 1;
      }
    else passed += part.size;
  }
  return found;
}

export function readAcknowledgement(message: AcknowledgementMessage, params: Record<string, unknown>): Acknowledgement {
  return {
    replica: message.replica,
    ok: message.ok,
    step: message.step ?? null,
    changes: message.changes ?? pairs(message.old, message.new, params),
    refused: message.refused ?? {},
    reason: message.reason ?? null,
    waiting: message.waiting === true,
    evidence: message.evidence ?? {},
    taken: message.taken ?? [],
    time: null,
  };
}

function pairs(old: unknown, fresh: unknown, params: Record<string, unknown>): Record<string, Change> {
  const keys = Object.keys(params);
  if (isRecord(fresh) && Object.keys(fresh).every((key) => key in params))
    return Object.fromEntries(
      Object.entries(fresh).map(([key, one]) => [key, { old: isRecord(old) ? (old[key] ?? null) : null, new: one }]),
    );
  if (fresh == null || keys.length !== 1) return {};
  return { [keys[0]!]: { old: old ?? null, new: fresh } };
}

function isRecord(given: unknown): given is Record<string, unknown> {
  return typeof given === 'object' && given !== null && !Array.isArray(given);
}

const OPPOSITES: Readonly<Record<string, CommandKind>> = {
  pause: 'resume',
  resume: 'pause',
  deactivate_device: 'reactivate',
  reactivate: 'deactivate_device',
};

/** Return the commands that take a command back; none if it changed nothing whose old value is known. */
export function takeBack(run: CommandRun): Order[] {
  if (!run.applied.size) return [];
  const kind = OPPOSITES[run.kind];
  // The weaver adds the devices of a group to the parameters.
  const about = 'group' in run.params ? { group: run.params['group'] } : { device: run.params['device'] };
  if (kind === 'pause' || kind === 'resume') return [{ kind, target: [...run.applied], params: {} }];
  if (kind) return [{ kind, target: undefined, params: about }];
  if (run.kind !== 'update_config') return [];
  return [...run.undo.values()].map(({ target, params }) => ({ kind: 'update_config', target: [...target], params }));
}

const MOST_SENTENCES = 8;

/** Return what takes a command back, as sentences; none if nothing does. */
export function describeUndo(run: CommandRun): string[] {
  if (!run.applied.size) return [];
  if (run.kind === 'update_config') return [...run.undo.values()].slice(0, MOST_SENTENCES).map((one) => describeCommand('update_config', one.params));
  const kind = OPPOSITES[run.kind];
  return kind ? [describeCommand(kind, run.params)] : [];
}

/** Return a sentence of what a command does, without its target. */
export function describeCommand(kind: string, params: Record<string, unknown>): string {
  const device = isolate(String(params['device'] ?? params['group'] ?? 'a device'));
  switch (kind) {
    case 'update_config':
      return Object.entries(params)
        .map(([key, one]) => isolate(`${key} = ${typeof one === 'string' ? one : JSON.stringify(one)}`))
        .join(', ');
    case 'deactivate_device':
      return `deactivate ${device}`;
    case 'reactivate':
      return `reactivate ${device}`;
    case 'device_failed':
      return `notify of a failure of ${device}`;
    case 'inject':
      return `inject ${String(params['fault'] ?? 'a fault')}`;
    case 'remove_fault':
      return 'remove a fault';
    case 'policy':
      return `on a device's failure: ${String(params['action'])}`;
    default:
      return kind;
  }
}
