/** The replicas: their descriptions as objects, which change in place, and their values in columns. */

import { shortName, toNumber } from '../format';
import { lossName } from '../series';
import { ENDED, type ReplicaChange, type ReplicaInfo, type ReplicaState } from '../types';
import { Columns } from './columns';
import type { Section } from './frames';

export interface Replica extends ReplicaInfo {
  job: string;
  /** By which frames name it, and its place in the columns. */
  number: number;
  /** Seconds that the last steps took each; null before there are two reports. */
  pace: number | null;
  loss: number | null;
}

/**
 * A replica that reads its values from the columns.
 *
 * Each property has a value from the beginning: V8 then keeps them in the object itself, and in a sixth of the memory that
 * it takes for properties that are added later.
 */
class Member implements Replica {
  readonly number: number;
  job = '';
  /** The last report that came whole, from which the next one's pace is computed. */
  measured: { step: number; time: number } | null = null;
  id = '';
  group = '';
  host = '';
  pid = 0;
  session: string | null = null;
  procs: string | null = null;
  mesh: string | null = null;
  rank: number | null = null;
  actors: string | null = null;
  devices: string[] = [];
  handlers: Record<string, string> = {};
  config: Record<string, unknown> = {};
  epoch: number | null = null;
  max_step: number | null = null;
  metrics: ReplicaInfo['metrics'] = {};
  reported: number | null = null;
  phase = '';
  registered = 0;
  changed = 0;
  died_of: string | null = null;
  ending: string | null = null;
  ended_by: string | null = null;
  end_reason: string | null = null;
  exit: ReplicaInfo['exit'] = null;
  injectable = false;
  cohort: ReplicaInfo['cohort'] = null;
  links: Record<string, string> = {};
  run: string | null = null;
  not_offered: Record<string, string> = {};
  step_time: number | null = null;
  instance = '';
  seq = 0;
  user = '';
  #columns: Columns;

  constructor(number: number, columns: Columns) {
    this.number = number;
    this.#columns = columns;
  }

  get state(): ReplicaState {
    return this.#columns.stateOf(this.number) as ReplicaState;
  }

  set state(state: ReplicaState) {
    this.#columns.setState(this.number, state);
  }

  get connected(): boolean {
    return this.#columns.state[this.number]! < 0x80;
  }

  set connected(connected: boolean) {
    this.#columns.setConnected(this.number, connected);
  }

  get step(): number | null {
    return this.#columns.stepOf(this.number);
  }

  set step(step: number | null) {
    this.#columns.setStep(this.number, step);
  }

  get loss(): number | null {
    return this.#columns.lossOf(this.number);
  }

  set loss(loss: number | null) {
    this.#columns.setLoss(this.number, loss);
  }

  get pace(): number | null {
    return this.#columns.paceOf(this.number);
  }

  set pace(pace: number | null) {
    this.#columns.setPace(this.number, pace);
  }
}

const SHARED = ['handlers', 'config', 'links', 'not_offered'] as const;

export function isLiving(one: Replica): boolean {
  return !ENDED.has(one.state);
}

/** Return a copy of a replica as it is now. */
export function copyOf(one: Replica): Replica {
  const { state, connected, step, loss, pace } = one;
  return { ...one, state, connected, step, loss, pace };
}

/** Objects that are never changed: of equal ones the first. Ten thousand ranks have a few configurations and handlers. */
class Shared {
  #known = new Map<string, object>();

  of<T extends object>(one: T): T {
    const text = JSON.stringify(one);
    const known = this.#known.get(text);
    if (known === undefined) this.#known.set(text, one);
    return (known as T | undefined) ?? one;
  }
}

export class Replicas {
  columns = new Columns();
  #shared = new Shared();
  #byId = new Map<string, Member>();
  #ordered: Member[] = [];
  /** Those that are not in `#ordered` yet, or in the wrong place; null: most of them. */
  #moved: Set<Member> | null = new Set();

  get map(): ReadonlyMap<string, Replica> {
    return this.#byId;
  }

  get(id: string): Member | undefined {
    return this.#byId.get(id);
  }

  /** The replicas, ordered by group, session and rank: a new list after each change of it. */
  get ordered(): readonly Replica[] {
    const moved = this.#moved;
    if (moved === null || moved.size > 100) this.#ordered = [...this.#byId.values()].sort(byPlace);
    else if (moved.size) {
      const kept = this.#ordered.filter((one) => !moved.has(one));
      for (const one of moved) kept.splice(placeIn(kept, one), 0, one);
      this.#ordered = kept;
    }
    this.#moved = new Set();
    return this.#ordered;
  }

  /** Replace all replicas. The pace of a process that goes on is kept. */
  replace(infos: readonly ReplicaInfo[], numbers: readonly number[] | undefined, states: readonly string[] | undefined): void {
    const before = this.#byId;
    this.columns = new Columns(states);
    this.#shared = new Shared();
    this.#byId = new Map();
    this.#moved = null;
    this.columns.reserve(infos.length - 1);
    infos.forEach((info, at) => {
      const known = before.get(info.id);
      const made = this.#make(info, numbers?.[at] ?? at);
      if (known && known.instance === info.instance && known.pace !== null) made.pace = known.pace;
    });
  }

  /** Take a description; return whether it moves the replica to another place of the order. */
  put(info: ReplicaInfo, number?: number): boolean {
    const known = this.#byId.get(info.id);
    if (!known || (number !== undefined && number !== known.number)) {
      if (known) this.forget([info.id]);
      const made = this.#make(info, number ?? this.#free());
      this.#moved?.add(made);
      return true;
    }
    const moved = known.group !== info.group || known.session !== info.session || known.rank !== info.rank;
    // A known replica stays the same object: lists of members hold it.
    this.#describe(known, info, known.instance === info.instance ? known.pace : info.step_time);
    if (moved) this.#moved?.add(known);
    return moved;
  }

  #make(info: ReplicaInfo, number: number): Member {
    this.columns.reserve(number);
    const made = new Member(number, this.columns);
    this.#byId.set(info.id, made);
    this.#describe(made, info, info.step_time);
    return made;
  }

  #describe(one: Member, info: ReplicaInfo, pace: number | null): void {
    one.job = info.session ? `${info.group}@${info.session}` : info.group;
    one.measured = info.step === null || info.reported === null ? null : { step: info.step, time: info.reported };
    Object.assign(one, info);
    for (const part of SHARED) if (one[part]) (one as Record<typeof part, object>)[part] = this.#shared.of<object>(one[part]);
    one.loss = lossOf(info.metrics);
    one.pace = pace;
    this.columns.setJob(one.number, one.job);
  }

  /** The first number after those that are given: a gateway that sends no numbers sends no frames either. */
  #free(): number {
    let highest = -1;
    for (const one of this.#byId.values()) highest = Math.max(highest, one.number);
    return highest + 1;
  }

  /** Take away replicas; return whether some were known. */
  forget(ids: readonly string[]): boolean {
    const gone = new Set<Member>();
    for (const id of ids) {
      const known = this.#byId.get(id);
      if (!known) continue;
      this.#byId.delete(id);
      this.#moved?.delete(known);
      gone.add(known);
    }
    if (gone.size) this.#ordered = this.#ordered.filter((one) => !gone.has(one));
    return gone.size > 0;
  }

  /** Take a section of a frame; return whether a state has changed. */
  take(section: Section): boolean {
    return this.columns.take(section);
  }

  /** Say that the next whole change of a replica does not follow one that has come before. */
  interrupt(id: string): void {
    const known = this.#byId.get(id);
    if (known) known.measured = null;
  }

  /** Take a whole change of a replica. With `paced` its pace is computed, too: no frames have it. */
  change(one: Replica, change: ReplicaChange, paced: boolean): void {
    const known = one as Member;
    if (change.state !== undefined) known.state = change.state;
    if (change.connected !== undefined) known.connected = change.connected;
    if (change.step !== undefined) known.step = change.step;
    if (change.epoch !== undefined) known.epoch = change.epoch;
    if (change.max_step !== undefined) known.max_step = change.max_step;
    if (change.phase !== undefined) known.phase = change.phase;
    if (change.reported !== undefined) known.reported = change.reported;
    if (change.handlers !== undefined) known.handlers = change.handlers;
    if (change.cohort !== undefined) known.cohort = change.cohort;
    if (change.links !== undefined) known.links = change.links;
    if (change.not_offered !== undefined) known.not_offered = change.not_offered;
    if (change.metrics !== undefined) {
      known.metrics = change.metrics;
      known.loss = lossOf(change.metrics);
    }
    const before = known.measured;
    const step = change.step ?? before?.step;
    if (step === undefined || known.reported === null) return;
    known.measured = { step, time: known.reported };
    if (before === null || !paced || step <= before.step) return;
    const pace = (known.reported - before.time) / (step - before.step);
    if (pace > 0) known.pace = known.pace === null ? pace : known.pace + 0.3 * (pace - known.pace);
  }

  living(): Replica[] {
    return [...this.#byId.values()].filter(isLiving);
  }
}

function compare(one: string, other: string): number {
  return one < other ? -1 : one > other ? 1 : 0;
}

function byPlace(one: Replica, other: Replica): number {
  return (
    compare(one.group, other.group) ||
    compare(one.session ?? '', other.session ?? '') ||
    (one.rank ?? -1) - (other.rank ?? -1) ||
    numbered.compare(shortName(one.id), shortName(other.id))
  );
}

const numbered = new Intl.Collator('en', { numeric: true });

/** Return where a replica belongs in an ordered list. */
function placeIn(ordered: readonly Replica[], one: Replica): number {
  let low = 0;
  let high = ordered.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (byPlace(ordered[middle]!, one) < 0) low = middle + 1;
    else high = middle;
  }
  return low;
}

function lossOf(metrics: ReplicaInfo['metrics']): number | null {
  const name = lossName(Object.keys(metrics));
  return name === null ? null : toNumber(metrics[name]);
}
