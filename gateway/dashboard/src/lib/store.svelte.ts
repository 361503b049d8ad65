/**
 * The store: it takes the socket's messages and holds what the page knows. Components read it and call its actions.
 *
 * Replicas are kept in plain maps and changed in place. A counter for each subject tells components of changes, at
 * most once a frame, so that a delta with ten thousand replicas costs a loop and no more.
 */

import { Gateway, type Link } from './api';
import { CommandLog, takeBack, type CommandRun, type Order } from './commands';
import { faultKind } from './faults';
import { shortName, toNumber } from './format';
import { isGlob } from './glob';
import {
  ENDED,
  STATES,
  type CommandKind,
  type Delta,
  type DeviceInfo,
  type EndedSession,
  type GoodputRecord,
  type Identity,
  type Incoming,
  type MetricPoint,
  type Outgoing,
  type PolicyAction,
  type ReplicaChange,
  type ReplicaInfo,
  type ReplicaState,
  type SessionInfo,
  type Snapshot,
  type Target,
  type WeaverEvent,
  type WeaverStatus,
  type WorkerInfo,
} from './types';

const MOST_TARGETS = 50_000; // characters of a list of replicas: the gateway takes messages of 64 KiB
const KEPT_EVENTS = 2000;
const KEPT_POINTS = 900; // of a followed replica, and of each job
const SETTLED: ReadonlySet<string> = new Set(['running', 'paused', 'draining', 'stalled', 'recovering', 'failed', 'finished', 'registering']);

export interface Replica extends ReplicaInfo {
  job: string;
  /** Seconds that the last steps took each; null before there are two reports. */
  pace: number | null;
  loss: number | null;
}

export interface LivePoint {
  time: number;
  step: number | null;
  metrics: Record<string, number>;
}

export interface JobPoint {
  time: number;
  loss: number | null;
  rate: number | null;
}

export interface Job {
  name: string;
  group: string;
  session: string | null;
  user: string;
  replicas: number;
  living: number;
  states: Map<ReplicaState, number>;
  step: number | null;
  maxStep: number | null;
  /** Steps a second of the median replica. */
  rate: number | null;
  /** The mean over the living replicas whose loss is finite. */
  loss: number | null;
  /** Living replicas whose loss is not finite. */
  notFinite: number;
  goodput: GoodputRecord | null;
  points: JobPoint[];
}

type Subject = 'replicas' | 'structure' | 'configs' | 'devices' | 'events' | 'commands' | 'live';

export class Store {
  link = $state.raw<Link>({ state: 'connecting', since: Date.now(), reason: '' });
  identity = $state.raw<Identity | null>(null);
  /** Null while it is not known whether somebody is signed in. */
  signedIn = $state<boolean | null>(null);
  signInMessage = $state<string | null>(null);
  /** Why the weaver is away; null if it is there. */
  away = $state<string | null>(null);
  /** Whether a snapshot has come. */
  loaded = $state(false);
  status = $state.raw<WeaverStatus | null>(null);
  policies = $state.raw<Record<string, PolicyAction>>({});
  goodput = $state.raw<GoodputRecord[]>([]);
  sessions = $state.raw<SessionInfo[]>([]);
  endedSessions = $state.raw<EndedSession[]>([]);
  workers = $state.raw<WorkerInfo[]>([]);
  /** The current time by the weaver's clock, in seconds; it moves once a second. */
  now = $state(Date.now() / 1000);

  #versions = $state({ replicas: 0, structure: 0, configs: 0, devices: 0, events: 0, commands: 0, live: 0 });
  #dirty = new Set<Subject>();
  #scheduled = false;
  #replicas = new Map<string, Replica>();
  #ordered: Replica[] | null = null;
  #devices = new Map<string, DeviceInfo>();
  #events: WeaverEvent[] = []; // the oldest first
  #log = new CommandLog();
  #unsent = new Map<string, Outgoing>(); // commands without an answer, which are sent again after a reconnect
  #summary: Job[] | null = null;
  #jobPoints = new Map<string, JobPoint[]>();
  #sampled = 0;
  #followed = new Map<string, { readers: number; points: LivePoint[] }>();
  #fetching = new Set<string>();
  #offset = 0; // seconds by which the weaver's clock is ahead of the browser's

  readonly gateway: Gateway;

  constructor(base?: URL) {
    this.gateway = new Gateway(
      {
        message: (message) => this.handleWebSocketMessage(message),
        link: (link) => {
          this.link = link;
        },
        signedIn: (identity) => {
          this.identity = identity;
          this.signedIn = true;
          this.signInMessage = null;
        },
        signedOut: (message) => this.#signedOut(message),
      },
      base,
    );
  }

  // What components read

  get replicas(): ReadonlyMap<string, Replica> {
    void this.#versions.replicas;
    return this.#replicas;
  }

  /** The replicas, ordered by group, session and rank. */
  get ordered(): readonly Replica[] {
    void this.#versions.replicas;
    this.#ordered ??= [...this.#replicas.values()].sort(byPlace);
    return this.#ordered;
  }

  /** As `ordered`, for readers that only need to know which replicas there are. */
  get members(): readonly Replica[] {
    void this.#versions.structure;
    this.#ordered ??= [...this.#replicas.values()].sort(byPlace);
    return this.#ordered;
  }

  /** Changes whenever a configuration or a handler does. */
  get configs(): number {
    return this.#versions.configs;
  }

  /** A copy of a replica, so that components see each change of it. */
  replica(id: string): Replica | null {
    void this.#versions.replicas;
    const found = this.#replicas.get(id);
    return found ? { ...found } : null;
  }

  get devices(): DeviceInfo[] {
    void this.#versions.devices;
    return [...this.#devices.values()].map((one) => ({ ...one }));
  }

  /** The events, the oldest first. */
  get events(): readonly WeaverEvent[] {
    void this.#versions.events;
    return this.#events.slice();
  }

  /** The commands, the newest first. */
  get commands(): CommandRun[] {
    void this.#versions.commands;
    return this.#log.list().map((one) => ({ ...one }));
  }

  command(id: string | null): CommandRun | null {
    void this.#versions.commands;
    const found = id === null ? undefined : this.#log.get(id);
    return found ? { ...found } : null;
  }

  get canOperate(): boolean {
    return this.identity !== null && this.identity.scope !== 'view';
  }

  /** Why controls are disabled; null if they are not. */
  get whyDisabled(): string | null {
    if (!this.canOperate)
      return `Your token's scope is ${this.identity?.scope ?? 'unknown'}. Controls need a token of scope operate.`;
    if (this.link.state !== 'open') return 'The connection to the gateway is lost. Controls work again when it is back.';
    if (this.away !== null) return 'The weaver is away. Controls work again when it is back.';
    return null;
  }

  readonly jobs: Job[] = $derived.by(() => {
    void this.#versions.replicas;
    const goodput = this.goodput;
    return this.#summarise().map((job) => ({
      ...job,
      goodput: recordOf(job, goodput),
      points: this.#jobPoints.get(job.name)?.slice() ?? [],
    }));
  });

  readonly stateCounts: Map<ReplicaState, number> = $derived.by(() => {
    void this.#versions.replicas;
    const counts = new Map<ReplicaState, number>();
    for (const job of this.#summarise())
      for (const [state, count] of job.states) counts.set(state, (counts.get(state) ?? 0) + count);
    return counts;
  });

  /** The live points of a followed replica, the oldest first. */
  livePoints(id: string): readonly LivePoint[] {
    void this.#versions.live;
    return this.#followed.get(id)?.points ?? [];
  }

  // What components do

  updateConfig(target: Target, params: Record<string, unknown>): string {
    return this.give('update_config', target, params);
  }

  pause(target: Target): string {
    return this.give('pause', target);
  }

  resume(target: Target): string {
    return this.give('resume', target);
  }

  stop(target: Target): string {
    return this.give('stop', target);
  }

  drain(target: Target): string {
    return this.give('drain', target);
  }

  /** Take out of use a device, or the devices of a group or replica. */
  deactivate(what: { device: string } | { group: string }): string {
    return this.give('deactivate_device', undefined, what);
  }

  reactivate(what: { device: string } | { group: string }): string {
    return this.give('reactivate', undefined, what);
  }

  /** Give a command and return its id, by which `command` finds what became of it. */
  give(kind: CommandKind, target: Target | undefined, params: Record<string, unknown> = {}): string {
    const id = newId();
    const short = Array.isArray(target) ? this.#shorten(target) : target;
    // Without a target those on the devices are meant.
    const whom = short === undefined ? {} : { target: short };
    this.#submit(kind, short ?? String(params['group'] ?? ''), params, { type: 'command', id, kind, ...whom, params }, true);
    return id;
  }

  /** Return a long list of replicas as a group, or as all, if it is that. */
  #shorten(ids: string[]): Target {
    if (ids.length < 50) return ids;
    const wanted = new Set(ids);
    const living = [...this.#replicas.values()].filter((one) => !ENDED.has(one.state));
    if (living.length === wanted.size && living.every((one) => wanted.has(one.id))) return '*';
    const group = this.#replicas.get(ids[0]!)?.group;
    const members = living.filter((one) => one.group === group);
    const other = living.some((one) => one.group !== group && (one.id === group || shortName(one.id) === group));
    const same = members.length === wanted.size && members.every((one) => wanted.has(one.id));
    return group && same && !other && !isGlob(group) && !this.#replicas.has(group) ? group : ids;
  }

  setPolicy(group: string, action: PolicyAction): string {
    const id = newId();
    this.#submit('set_policy', group, { action }, { type: 'policy', id, group, action }, true);
    return id;
  }

  inject(fault: string, target: Target, params: Record<string, unknown>, duration: number | null): string {
    const id = newId();
    // A fault of Loom's own processes would be injected twice.
    const again = ['replica', 'host'].includes(faultKind(fault)?.of ?? '');
    const message: Outgoing = { type: 'inject', id, fault, target, params, duration };
    this.#submit('inject', target, { fault, params, duration }, message, again);
    return id;
  }

  removeFault(injection: string): string {
    const id = newId();
    this.#submit('remove_fault', injection, { injection }, { type: 'remove_fault', id, injection }, true);
    return id;
  }

  /** Give the commands that take a command back; return their ids. */
  takeBack(run: CommandRun): string[] {
    return takeBack(run).map((one: Order) => this.give(one.kind, one.target, one.params));
  }

  async endSession(name: string): Promise<void> {
    await this.gateway.request('DELETE', `sessions/${encodeURIComponent(name)}`);
    await this.loadSessions();
  }

  async reportDeviceFailure(device: string, reason: string): Promise<void> {
    await this.gateway.request('POST', `weaver/devices/${encodeURIComponent(device)}/failure`, { reason, report: newId() });
  }

  async loadSessions(): Promise<void> {
    type Answer = { sessions: SessionInfo[]; ended: EndedSession[] };
    const { sessions, ended } = await this.gateway.request<Answer>('GET', 'sessions?ended=true');
    this.sessions = sessions;
    this.endedSessions = ended;
  }

  /** Load older commands and what became of them. */
  async loadCommands(): Promise<void> {
    for (const kind of ['command', 'policy', 'applied', 'refused', 'unanswered', 'fault_removed']) {
      const { events } = await this.gateway.request<{ events: WeaverEvent[] }>('GET', `weaver/events?limit=1000&kind=${kind}`);
      for (const event of events) {
        this.#log.take(event);
        if (kind === 'fault_removed') this.#keepEvent(event);
      }
    }
    this.#touch('commands');
  }

  /** Load the timelines and all faults of jobs, which are not pushed. */
  async loadGoodput(job?: string): Promise<void> {
    const { jobs } = await this.gateway.request<{ jobs: GoodputRecord[] }>('GET', `weaver/goodput${job ? `?job=${encodeURIComponent(job)}` : ''}`);
    this.#takeGoodput(jobs, false);
  }

  async loadEvents(query: { kind?: string; replica?: string; limit?: number }): Promise<WeaverEvent[]> {
    const search = new URLSearchParams({ limit: String(query.limit ?? 200) });
    if (query.kind) search.set('kind', query.kind);
    if (query.replica) search.set('replica', query.replica);
    return (await this.gateway.request<{ events: WeaverEvent[] }>('GET', `weaver/events?${search}`)).events;
  }

  async loadMetrics(replica: string): Promise<string[]> {
    return (await this.gateway.request<{ metrics: string[] }>('GET', `weaver/replicas/${encodeURIComponent(replica)}/metrics`)).metrics;
  }

  async loadHistory(replica: string, metric: string, since?: number, until?: number, points = 500): Promise<MetricPoint[]> {
    const search = new URLSearchParams({ points: String(points) });
    if (since !== undefined) search.set('since', String(since));
    if (until !== undefined) search.set('until', String(until));
    const path = `weaver/replicas/${encodeURIComponent(replica)}/metrics/${encodeURIComponent(metric)}?${search}`;
    return (await this.gateway.request<{ points: MetricPoint[] }>('GET', path)).points;
  }

  async loadStacks(replica: string): Promise<string> {
    return await this.gateway.text(`weaver/replicas/${encodeURIComponent(replica)}/stacks`);
  }

  /** Keep the live points of a replica until the returned function is called. */
  follow(id: string): () => void {
    const followed = this.#followed.get(id) ?? { readers: 0, points: [] };
    followed.readers += 1;
    this.#followed.set(id, followed);
    return () => {
      followed.readers -= 1;
      if (followed.readers === 0) this.#followed.delete(id);
    };
  }

  /** Begin: sign in, connect, and let the time pass. */
  begin(): void {
    void this.gateway.begin();
    setInterval(() => this.tick(), 1000);
    const hurry = (): void => {
      if (!document.hidden) this.gateway.hurry();
    };
    document.addEventListener('visibilitychange', hurry);
    window.addEventListener('online', hurry);
  }

  tick(): void {
    this.now = Date.now() / 1000 + this.#offset;
  }

  // What the socket says

  handleWebSocketMessage(message: Incoming): void {
    switch (message.type) {
      case 'snapshot':
        return this.#takeSnapshot(message);
      case 'delta':
        return this.#takeDelta(message);
      case 'event':
        return this.#takeEvent(message.event, message.info);
      case 'away':
        this.away = message.reason || 'it does not answer';
        return;
      case 'accepted':
        this.#log.accept(message.id, message.command, message.replicas ?? []);
        return this.#touch('commands');
      case 'acknowledgement':
        this.#log.acknowledge(message, this.#clock());
        return this.#touch('commands');
      case 'done':
        this.#unsent.delete(message.id);
        this.#log.done(message.id);
        return this.#touch('commands');
      case 'error':
        if (message.id === null) return;
        this.#unsent.delete(message.id);
        this.#log.fail(message.id, message.message);
        return this.#touch('commands');
    }
  }

  #takeSnapshot(message: Snapshot): void {
    this.#offset = message.status.time - Date.now() / 1000;
    this.tick();
    this.status = message.status;
    this.away = null;
    const before = this.#replicas;
    this.#replicas = new Map();
    this.#ordered = null;
    for (const one of message.replicas) this.#putReplica(one, before.get(one.id));
    this.#devices = new Map(message.devices.map((one) => [one.uuid, one]));
    this.#takeCommon(message);
    for (const event of message.events ?? []) {
      this.#keepEvent(event);
      this.#log.take(event);
    }
    this.#summary = null;
    this.#samplePoints();
    this.loaded = true;
    for (const one of ['replicas', 'structure', 'devices', 'events', 'commands'] as const) this.#touch(one);
    for (const [id, one] of this.#unsent) {
      const run = this.#log.get(id);
      if (!run || run.phase === 'done') this.#unsent.delete(id);
      else this.gateway.send(one);
    }
  }

  #takeDelta(message: Delta): void {
    const changed = message.replicas ?? {};
    for (const id in changed) this.#changeReplica(id, changed[id]!);
    const { devices, device_states: states } = message;
    for (const uuid in devices) {
      const known = this.#devices.get(uuid);
      if (known) known.status = devices[uuid]!;
      this.#touch('devices');
    }
    for (const uuid in states) {
      const one = states[uuid];
      if (one) this.#devices.set(uuid, { ...one, status: this.#devices.get(uuid)?.status ?? null });
      else this.#devices.delete(uuid);
      this.#touch('devices');
    }
    this.#takeCommon(message);
    this.#summary = null;
    this.#samplePoints();
    this.#touch('replicas');
  }

  #takeCommon(message: Snapshot | Delta): void {
    if (message.policies) this.policies = message.policies;
    if (message.goodput) this.#takeGoodput(message.goodput, message.type === 'snapshot');
    if (message.sessions) this.sessions = message.sessions;
    if (message.workers) this.workers = message.workers;
  }

  /** Take the goodput of some jobs; pushed records have no timeline, so that the known one is kept. */
  #takeGoodput(records: readonly GoodputRecord[], all: boolean): void {
    const key = (one: GoodputRecord): string => JSON.stringify([one.user, one.job]);
    const before = new Map(this.goodput.map((one) => [key(one), one]));
    const fresh = records.map((one) => {
      const known = before.get(key(one));
      return { ...one, course: one.course?.length ? one.course : (known?.course ?? []), faults: one.faults ?? known?.faults ?? [] };
    });
    if (all) this.goodput = fresh;
    else this.goodput = [...new Map([...before, ...fresh.map((one) => [key(one), one] as const)]).values()];
  }

  #takeEvent(event: WeaverEvent, info?: ReplicaInfo): void {
    this.#keepEvent(event);
    this.#touch('events');
    if (this.#log.take(event)) this.#touch('commands');
    if (info) this.#putReplica(info, this.#replicas.get(info.id));
    this.#apply(event);
    this.#summary = null;
    this.#touch('replicas');
    if (event.kind === 'registered' && !info && event.replica !== null) void this.#fetchReplica(event.replica);
  }

  /** Apply what an event says of a replica, a device or a policy. */
  #apply(event: WeaverEvent): void {
    const known = event.replica === null ? undefined : this.#replicas.get(event.replica);
    if (known && SETTLED.has(event.kind)) {
      known.state = event.kind as ReplicaState;
      known.changed = event.time;
      if (event.kind === 'failed') known.died_of = String(event['reason'] ?? event['why'] ?? '');
    }
    if (known && (event.kind === 'applied' || event.kind === 'config')) {
      const changes = (event['changes'] as Record<string, { new: unknown }> | undefined) ?? {};
      const fresh = Object.entries(changes).map(([key, one]) => [key, one.new]);
      if (fresh.length) {
        known.config = { ...known.config, ...Object.fromEntries(fresh) };
        this.#touch('configs');
      }
    }
    if (known && event.kind === 'devices_changed') {
      const removed = new Set((event['removed'] as string[] | undefined) ?? []);
      const added = (event['added'] as string[] | undefined) ?? [];
      known.devices = [...known.devices.filter((one) => !removed.has(one)), ...added];
      for (const uuid of removed) this.#useDevice(uuid, known.id, false);
      for (const uuid of added) this.#useDevice(uuid, known.id, true);
    }
    if (event.kind === 'device_failed') {
      const failed = event['device'] as DeviceInfo | undefined;
      const device = failed && this.#devices.get(failed.uuid);
      if (device) Object.assign(device, { state: 'failed', reason: event['reason'] ?? null });
      this.#touch('devices');
    }
    if (event.kind === 'policy')
      this.policies = { ...without(this.policies, String(event['group'])), [String(event['group'])]: event['action'] as PolicyAction };
  }

  #useDevice(uuid: string, replica: string, uses: boolean): void {
    const device = this.#devices.get(uuid);
    if (!device) return;
    device.replicas = device.replicas.filter((one) => one !== replica);
    if (uses) device.replicas.push(replica);
    this.#touch('devices');
  }

  #keepEvent(event: WeaverEvent): void {
    const events = this.#events;
    const last = events.at(-1);
    if (!last || event.id > last.id) events.push(event);
    else {
      let low = 0;
      let high = events.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (events[middle]!.id < event.id) low = middle + 1;
        else high = middle;
      }
      // An event whose id has come before is that event with an addition.
      events.splice(low, events[low]?.id === event.id ? 1 : 0, event);
    }
    if (events.length > KEPT_EVENTS) events.splice(0, events.length - KEPT_EVENTS);
  }

  #putReplica(info: ReplicaInfo, before?: Replica): void {
    const known = this.#replicas.get(info.id);
    const fresh: Replica = {
      ...info,
      job: info.session ? `${info.group}@${info.session}` : info.group,
      pace: before && before.instance === info.instance ? before.pace : info.step_time,
      loss: toNumber(info.metrics['loss']),
    };
    const moved =
      !known || known.group !== fresh.group || known.session !== fresh.session || known.rank !== fresh.rank;
    this.#touch('configs');
    // A known replica stays the same object: lists of members hold it.
    if (known) Object.assign(known, fresh);
    else this.#replicas.set(info.id, fresh);
    for (const uuid of info.devices) {
      const device = this.#devices.get(uuid);
      if (device && !device.replicas.includes(info.id)) this.#useDevice(uuid, info.id, true);
    }
    if (!moved) return;
    this.#ordered = null;
    this.#touch('structure');
  }

  #changeReplica(id: string, change: ReplicaChange): void {
    const known = this.#replicas.get(id);
    if (!known) return void this.#fetchReplica(id);
    const { step, reported } = known;
    if (change.handlers) this.#touch('configs');
    // Field by field: ten thousand of these take half the time of Object.assign.
    if (change.state !== undefined) known.state = change.state;
    if (change.step !== undefined) known.step = change.step;
    if (change.epoch !== undefined) known.epoch = change.epoch;
    if (change.max_step !== undefined) known.max_step = change.max_step;
    if (change.phase !== undefined) known.phase = change.phase;
    if (change.reported !== undefined) known.reported = change.reported;
    if (change.connected !== undefined) known.connected = change.connected;
    if (change.handlers !== undefined) known.handlers = change.handlers;
    if (change.metrics !== undefined) {
      known.metrics = change.metrics;
      known.loss = toNumber(change.metrics['loss']);
      const followed = this.#followed.get(id);
      if (followed && known.reported !== null && known.reported !== reported) this.#followPoint(followed.points, known);
    }
    if (step !== null && reported !== null && known.step !== null && known.reported !== null && known.step > step) {
      const pace = (known.reported - reported) / (known.step - step);
      if (pace > 0) known.pace = known.pace === null ? pace : known.pace + 0.3 * (pace - known.pace);
    }
  }

  #followPoint(points: LivePoint[], known: Replica): void {
    const metrics: Record<string, number> = {};
    for (const [name, one] of Object.entries(known.metrics)) {
      const read = toNumber(one);
      if (read !== null) metrics[name] = read;
    }
    points.push({ time: known.reported!, step: known.step, metrics });
    if (points.length > KEPT_POINTS) points.shift();
    this.#touch('live');
  }

  /** Load a replica that a message named before its description came. */
  async #fetchReplica(id: string): Promise<void> {
    if (this.#fetching.has(id) || this.#fetching.size >= 20) return;
    this.#fetching.add(id);
    try {
      this.#putReplica(await this.gateway.request<ReplicaInfo>('GET', `weaver/replicas/${encodeURIComponent(id)}`));
      this.#summary = null;
      this.#touch('replicas');
    } catch {
      // It is gone again, or the next snapshot has it.
    } finally {
      this.#fetching.delete(id);
    }
  }

  /** The jobs as they are now; computed once for each change. */
  #summarise(): Job[] {
    this.#summary ??= this.#computeJobs();
    return this.#summary;
  }

  #computeJobs(): Job[] {
    const found = new Map<string, { job: Job; paces: number[]; losses: number[] }>();
    for (const one of this.#replicas.values()) {
      let entry = found.get(one.job);
      if (!entry) {
        const job: Job = {
          name: one.job,
          group: one.group,
          session: one.session,
          user: one.user,
          replicas: 0,
          living: 0,
          states: new Map(),
          step: null,
          maxStep: null,
          rate: null,
          loss: null,
          notFinite: 0,
          goodput: null,
          points: [],
        };
        found.set(one.job, (entry = { job, paces: [], losses: [] }));
      }
      const { job } = entry;
      job.replicas += 1;
      job.states.set(one.state, (job.states.get(one.state) ?? 0) + 1);
      if (one.step !== null && (job.step === null || one.step > job.step)) job.step = one.step;
      if (one.max_step !== null && (job.maxStep === null || one.max_step > job.maxStep)) job.maxStep = one.max_step;
      if (ENDED.has(one.state)) continue;
      job.living += 1;
      if (one.pace !== null && one.state === 'running') entry.paces.push(one.pace);
      if (one.loss !== null && Number.isFinite(one.loss)) entry.losses.push(one.loss);
      else if (one.loss !== null) job.notFinite += 1;
    }
    for (const { job, paces, losses } of found.values()) {
      const pace = median(paces);
      job.rate = pace ? 1 / pace : null;
      job.loss = losses.length ? losses.reduce((sum, one) => sum + one, 0) / losses.length : null;
    }
    return [...found.values()]
      .map((one) => one.job)
      .sort((one, other) => Number(other.living > 0) - Number(one.living > 0) || compare(one.name, other.name));
  }

  /** Note each job's loss and rate, at most once a second. */
  #samplePoints(): void {
    const time = this.#clock();
    if (time - this.#sampled < 0.9) return;
    this.#sampled = time;
    for (const job of this.#summarise()) {
      if (!job.living) continue;
      const points = this.#jobPoints.get(job.name) ?? [];
      points.push({ time, loss: job.loss, rate: job.rate });
      if (points.length > KEPT_POINTS) points.shift();
      this.#jobPoints.set(job.name, points);
    }
  }

  #submit(kind: string, target: Target, params: Record<string, unknown>, message: Outgoing, again: boolean): void {
    const id = (message as { id: string }).id;
    this.#log.add(id, kind, target, params, this.identity?.name ?? '', this.#clock());
    if (Array.isArray(target) && JSON.stringify(target).length > MOST_TARGETS) {
      this.#log.fail(id, 'These are too many single replicas for one command. Choose a group, a glob, or fewer.');
      return this.#touch('commands');
    }
    if (again) this.#unsent.set(id, message);
    if (!this.gateway.send(message) && !again) this.#log.fail(id, 'There was no connection. Nothing was sent.');
    this.#touch('commands');
  }

  #signedOut(message: string | null): void {
    this.identity = null;
    this.signedIn = false;
    this.signInMessage = message;
    this.loaded = false;
    this.away = null;
    this.#replicas = new Map();
    this.#ordered = null;
    this.#devices = new Map();
    this.#events = [];
    this.#log = new CommandLog();
    this.#unsent.clear();
    this.#jobPoints.clear();
    this.#summary = null;
    this.goodput = [];
    this.sessions = [];
    this.endedSessions = [];
    this.workers = [];
    for (const one of ['replicas', 'structure', 'devices', 'events', 'commands'] as const) this.#touch(one);
  }

  #clock(): number {
    return Date.now() / 1000 + this.#offset;
  }

  #touch(subject: Subject): void {
    this.#dirty.add(subject);
    if (this.#scheduled) return;
    this.#scheduled = true;
    // A hidden page gets no frames, and needs few updates.
    if (document.hidden) setTimeout(() => this.flush(), 1000);
    else requestAnimationFrame(() => this.flush());
  }

  /** Tell components now of what has changed. */
  flush(): void {
    this.#scheduled = false;
    for (const one of this.#dirty) this.#versions[one] += 1;
    this.#dirty.clear();
  }
}

/** An id for a command: 32 hexadecimal digits. */
export function newId(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((one) => one.toString(16).padStart(2, '0')).join('');
}

function recordOf(job: Job, goodput: readonly GoodputRecord[]): GoodputRecord | null {
  return goodput.find((one) => one.job === job.name && (!one.user || !job.user || one.user === job.user)) ?? null;
}

function without<T>(record: Record<string, T>, key: string): Record<string, T> {
  return Object.fromEntries(Object.entries(record).filter(([one]) => one !== key));
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

export function median(values: number[]): number | null {
  if (!values.length) return null;
  const sorted = Float64Array.from(values).sort();
  return sorted[sorted.length >> 1]!;
}

export { STATES };
