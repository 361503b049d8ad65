/** What the page knows: the messages and frames of the socket in, and what components read out. */

import { CommandLog, type CommandRun } from '../commands';
import type { StepTimes } from '../lanes';
import type { Points } from '../series';
import { isShown } from '../shown.svelte';
import { ENDED } from '../types';
import type {
  Delta,
  DeviceInfo,
  DeviceStatus,
  GoodputRecord,
  Incoming,
  PolicyAction,
  ReplicaInfo,
  ReplicaState,
  SessionInfo,
  Snapshot,
  WeaverEvent,
  WeaverStatus,
  WorkerInfo,
} from '../types';
import { Changes } from './changes.svelte';
import type { Columns } from './columns';
import { Devices } from './devices';
import { EventLog } from './eventlog';
import type { Section } from './frames';
import { Jobs, mergeGoodput, type Job } from './jobs';
import { Live } from './live';
import { Position } from './position';
import { copyOf, Replicas, type Replica } from './replicas';
import { Steps } from './steps';
import type { Need, Subscriptions } from './subscriptions';

const SETTLED: ReadonlySet<string> = new Set(['running', 'paused', 'draining', 'stalled', 'recovering', 'failed', 'finished', 'registering']);
const SUBJECTS = ['structure', 'states', 'reports', 'configs', 'jobs', 'counts', 'devices', 'statuses', 'events', 'commands', 'live', 'runs'] as const;
type Subject = (typeof SUBJECTS)[number];
// With a command to ten thousand replicas, or while as many register, these change as often.
const SELDOM: Partial<Record<Subject, number>> = { structure: 250, configs: 1000, runs: 2000 };
// Of many replicas each reports once a second, and some do at any time.
const MANY = 1000;
const OF_MANY: Partial<Record<Subject, number>> = { jobs: 950, reports: 950 };
// Events after which the list of runs may be another.
const OF_RUNS: ReadonlySet<string> = new Set(['run_began', 'run_ended', 'run_changed', 'registered', 'finished', 'failed']);

export abstract class Known {
  /** Why the weaver is away; null if it is there. */
  away = $state<string | null>(null);
  /** Whether a snapshot has come. */
  loaded = $state(false);
  status = $state.raw<WeaverStatus | null>(null);
  policies = $state.raw<Record<string, PolicyAction>>({});
  goodput = $state.raw<GoodputRecord[]>([]);
  sessions = $state.raw<SessionInfo[]>([]);
  workers = $state.raw<WorkerInfo[]>([]);
  /** The current time by the weaver's clock, in seconds; it moves once a second. */
  now = $state(Date.now() / 1000);
  /** The same in steps of ten seconds, the last one that has passed: no derived value, so that a second costs its readers nothing. */
  tens = $state(tenOf(Date.now() / 1000));

  protected readonly changes = new Changes(
    SUBJECTS,
    (subject) => SELDOM[subject] ?? (this.held.map.size > MANY ? OF_MANY[subject] : undefined),
    () => this.tick(0.9),
  );
  protected readonly position = new Position();
  protected readonly log = new CommandLog();
  protected readonly held = new Replicas();
  protected abstract readonly subscriptions: Subscriptions;
  #live = new Live();
  #steps = new Steps();
  #jobs = new Jobs();
  #devices = new Devices();
  #events = new EventLog();
  #offset = 0; // seconds by which the weaver's clock is ahead of the browser's

  /** A snapshot has come, or the feed goes on: say again what the gateway may have missed. */
  protected abstract begun(anew: boolean): void;

  // What components read

  /** The replicas by id, for readers that need to know which there are and in which states. */
  get replicas(): ReadonlyMap<string, Replica> {
    this.changes.read('structure');
    this.changes.read('states');
    return this.held.map;
  }

  /** The replicas, ordered by group, session and rank, for readers that only need to know which there are. */
  get members(): readonly Replica[] {
    this.changes.read('structure');
    return this.held.ordered;
  }

  /** The values of all replicas by their numbers. Those of columns that nobody needs are old. */
  get columns(): Columns {
    this.changes.read('structure');
    this.changes.read('reports');
    return this.held.columns;
  }

  /** Changes whenever a configuration or a handler does. */
  get configs(): number {
    return this.changes.read('configs');
  }

  /** Changes whenever runs may have begun, ended or changed. */
  get runChanges(): number {
    return this.changes.read('runs');
  }

  /** A copy of a replica, so that components see each change of it. */
  replica(id: string): Replica | null {
    for (const one of ['structure', 'states', 'reports', 'configs'] as const) this.changes.read(one);
    const found = this.held.get(id);
    return found ? copyOf(found) : null;
  }

  /** The devices, for readers that do not need to know of new statuses. */
  get devices(): DeviceInfo[] {
    this.changes.read('devices');
    return this.#devices.list();
  }

  /** The newest status of a device. */
  deviceStatus(uuid: string): DeviceStatus | null {
    for (const one of ['devices', 'statuses'] as const) this.changes.read(one);
    return this.#devices.status(uuid);
  }

  /** The events, the oldest first. */
  get events(): readonly WeaverEvent[] {
    this.changes.read('events');
    return this.#events.list();
  }

  /** The commands, the newest first. */
  get commands(): CommandRun[] {
    this.changes.read('commands');
    return this.log.list().map((one) => ({ ...one }));
  }

  command(id: string | null): CommandRun | null {
    this.changes.read('commands');
    const found = id === null ? undefined : this.log.get(id);
    return found ? { ...found } : null;
  }

  readonly jobs: Job[] = $derived.by(() => {
    this.changes.read('jobs');
    return this.#jobs.list(this.goodput);
  });

  /** A job by its name. */
  job(name: string): Job | undefined {
    this.changes.read('jobs');
    this.#jobs.account(this.goodput);
    return this.#jobs.get(name);
  }

  readonly stateCounts: Map<ReplicaState, number> = $derived.by(() => {
    this.changes.read('counts');
    return this.#jobs.states();
  });

  /** The live points of a metric of a followed replica. */
  livePoints(id: string, metric: string): Points {
    this.changes.read('live');
    return this.#live.points(id, metric);
  }

  /** The steps of a followed replica over time, at the times of its live points. */
  liveSteps(id: string): Points {
    this.changes.read('live');
    return this.#live.steps(id);
  }

  /** The times of the newest steps of a replica that has a lane, the oldest first. */
  newestSteps(id: string): readonly StepTimes[] {
    this.changes.read('live');
    return this.#steps.of(id);
  }

  /** Have columns of all replicas, and whole rows of some, sent until the returned function is called. */
  need(need: Need): () => void {
    return this.subscriptions.need(need);
  }

  /** Keep the live points of a replica until the returned function is called. */
  follow(id: string): () => void {
    const leave = this.#live.follow(id);
    const withdraw = this.need({ rows: [id] });
    return () => {
      withdraw();
      leave();
    };
  }

  /** Keep the times of the newest steps of a replica, from its last one on, until the returned function is called. */
  followSteps(id: string): () => void {
    const leave = this.#steps.follow(id);
    const withdraw = this.need({ rows: [id] });
    const known = this.held.get(id);
    if (known && this.#steps.take(known)) this.changes.note('live');
    return () => {
      withdraw();
      leave();
    };
  }

  /** Let the time pass, unless it has lately. */
  tick(least = 0): void {
    const now = this.clock();
    if (Math.abs(now - this.now) < least) return;
    this.now = now;
    this.tens = tenOf(now);
  }

  protected clock(): number {
    return Date.now() / 1000 + this.#offset;
  }

  /** Call a function together with the next change that components are told of, so that one frame shows both. */
  later(act: () => void): void {
    this.changes.later(act);
  }

  /** Tell components now of what has changed. */
  flush(): void {
    this.changes.flush();
  }

  // What the socket says

  handleWebSocketMessage(message: Incoming): void {
    switch (message.type) {
      case 'snapshot':
        this.#takeSnapshot(message);
        break;
      case 'resumed':
        this.position.begin(message);
        this.begun(false);
        break;
      case 'delta':
        this.#takeDelta(message);
        break;
      case 'event':
        if (message.info) this.#putReplica(message.info, message.number);
        this.#takeEvent(message.event);
        break;
      case 'away':
        this.away = message.reason || 'it does not answer';
        break;
      default:
        this.takeAnswer(message);
    }
    this.position.take(message);
  }

  /** Take what the gateway answers to a message of this page. */
  protected abstract takeAnswer(message: Incoming): void;

  /** Take the values that a binary frame has. */
  handleFrame(sections: readonly Section[]): void {
    for (const one of sections) {
      if (this.held.columns.take(one)) this.changes.note('states');
      if (one.numbers === null) this.subscriptions.came(one.column);
    }
    this.changes.note('reports');
  }

  #takeSnapshot(message: Snapshot): void {
    this.#offset = message.status.time - Date.now() / 1000;
    this.tick();
    this.status = message.status;
    this.away = null;
    this.held.replace(message.replicas, message.numbers, message.states);
    this.#jobs.keep(new Set([...this.held.map.values()].map((one) => one.job)));
    this.#devices.replace(message.devices);
    this.#takeCommon(message);
    for (const event of message.events ?? []) {
      this.#events.keep(event);
      this.log.take(event);
    }
    this.loaded = true;
    this.position.begin(message);
    this.changes.noteAll(...SUBJECTS);
    this.begun(true);
  }

  #takeDelta(message: Delta): void {
    const { replicas = {} } = message;
    for (const id in replicas) this.#changeReplica(id, replicas[id]!);
    if (message.forgotten && this.held.forget(message.forgotten)) this.changes.note('structure', 'states', 'configs');
    if (message.aggregates) {
      if (this.#jobs.take(message.aggregates)) this.changes.note('counts');
      this.subscriptions.came('aggregates');
      this.changes.note('jobs');
    }
    if (this.#jobs.sample(this.clock())) this.changes.note('jobs');
    if (this.#devices.takeStatuses(message)) this.changes.note('statuses');
    if (this.#devices.take(message)) this.changes.note('devices');
    this.#takeCommon(message);
  }

  #takeCommon(message: Snapshot | Delta): void {
    if (message.policies) this.policies = message.policies;
    if (message.goodput) this.goodput = mergeGoodput(this.goodput, message.goodput, message.type === 'snapshot');
    if (message.sessions) this.sessions = message.sessions.filter(isShown);
    if (message.workers) this.workers = message.workers;
  }

  #takeEvent(event: WeaverEvent): void {
    this.#events.keep(event);
    this.changes.note('events');
    if (OF_RUNS.has(event.kind)) this.changes.note('runs');
    if (this.log.take(event)) this.changes.note('commands');
    const known = event.replica === null ? undefined : this.held.get(event.replica);
    if (known) this.#applyTo(known, event);
    if (event.kind === 'device_failed') {
      const failed = event['device'] as DeviceInfo | undefined;
      if (failed) this.#devices.fail(failed.uuid, (event['reason'] as string | undefined) ?? null);
      this.changes.note('devices');
    }
    if (event.kind === 'policy') {
      const group = String(event['group']);
      const others = Object.entries(this.policies).filter(([one]) => one !== group);
      this.policies = { ...Object.fromEntries(others), [group]: event['action'] as PolicyAction };
    }
  }

  /** Apply what an event says of its replica. */
  #applyTo(known: Replica, event: WeaverEvent): void {
    if (SETTLED.has(event.kind) && event.time >= known.changed) {
      known.state = event.kind as ReplicaState;
      known.changed = event.time;
      if (event.kind === 'failed') known.died_of = String(event['reason'] ?? event['why'] ?? '');
      noteEnd(known, event);
      this.changes.note('states');
    }
    const changes = (event['changes'] as Record<string, { new: unknown }> | undefined) ?? {};
    for (const key in changes) {
      known.config = { ...known.config, [key]: changes[key]!.new };
      this.changes.note('configs');
    }
    if (event.kind === 'devices_changed') {
      const removed = new Set((event['removed'] as string[] | undefined) ?? []);
      const added = (event['added'] as string[] | undefined) ?? [];
      known.devices = [...known.devices.filter((one) => !removed.has(one) && !added.includes(one)), ...added];
      for (const uuid of removed) this.#useDevice(uuid, known.id, false);
      for (const uuid of added) this.#useDevice(uuid, known.id, true);
      this.changes.note('configs');
    }
  }

  /** Take events of the past about commands. */
  protected takeOld(events: readonly WeaverEvent[]): void {
    for (const event of events) {
      this.log.take(event);
      if (event.kind === 'fault_removed') this.#events.keep(event);
    }
    this.changes.note('commands');
  }

  #useDevice(uuid: string, replica: string, uses: boolean): void {
    if (this.#devices.use(uuid, replica, uses)) this.changes.note('devices');
  }

  #putReplica(info: ReplicaInfo, number?: number): void {
    if (this.held.put(info, number)) this.changes.note('structure');
    this.changes.note('states', 'reports', 'configs');
    for (const uuid of info.devices) this.#useDevice(uuid, info.id, true);
  }

  #changeReplica(id: string, change: Parameters<Replicas['change']>[1]): void {
    const known = this.held.get(id);
    if (!known) return; // it was forgotten meanwhile
    const { state, reported } = known;
    this.held.change(known, change, !this.subscriptions.has('pace'));
    if (change.handlers ?? change.links ?? change.cohort ?? change.not_offered) this.changes.note('configs');
    if (known.state !== state) this.changes.note('states');
    if (change.metrics && known.reported !== reported) this.#takeReport(known);
    this.changes.note('reports');
  }

  #takeReport(known: Replica): void {
    const followed = this.#live.take(known);
    if (this.#steps.take(known) || followed) this.changes.note('live');
  }

  /** Forget everything: nobody is signed in any more. */
  protected clear(): void {
    this.loaded = false;
    this.away = null;
    this.status = null;
    this.policies = {};
    this.goodput = [];
    this.sessions = [];
    this.workers = [];
    this.position.end();
    this.held.replace([], undefined, undefined);
    this.#jobs.keep(new Set());
    this.#devices.replace([]);
    this.#events.clear();
    this.log.clear();
    this.changes.noteAll(...SUBJECTS);
  }
}

function tenOf(time: number): number {
  return Math.floor(time / 10) * 10;
}

/** Note how a replica has ended, or that it lives. */
function noteEnd(known: Replica, event: WeaverEvent): void {
  const ended = ENDED.has(event.kind);
  const text = (name: string): string | null => (ended && event[name] != null ? String(event[name]) : null);
  known.ending = text('ending');
  known.ended_by = text('ended_by');
  known.end_reason = text('reason');
  known.exit = ended ? ((event['exit'] as Replica['exit'] | undefined) ?? null) : null;
}
