/** The objects of the gateway's messages and answers, with the names that `loom.weaver.views` gives them. */

export const STATES = [
  'registering',
  'running',
  'paused',
  'draining',
  'stalled',
  'recovering',
  'failed',
  'finished',
] as const;

export type ReplicaState = (typeof STATES)[number];

export const ENDED: ReadonlySet<string> = new Set(['failed', 'finished']);

export type DeviceStateName = 'active' | 'inactive' | 'failed';

/** JSON has the texts NaN, Infinity and -Infinity for numbers that are not finite. */
export type MetricValue = number | string;

export interface WeaverStatus {
  weaver: string;
  started: number;
  time: number;
  replicas: Record<string, number>;
  devices: number;
  commands: number;
  event: number;
  reports: number;
  /** Since when nothing is stored, as on a full disk; null if everything is. */
  undurable_since?: number | null;
  undurable_reason?: string;
}

/** How a process ended, as far as its session has seen it. */
export interface ProcessExit {
  signal: number | null;
  code: number | null;
  out_of_memory: boolean;
  last_lines: string[];
}

export interface ReplicaInfo {
  id: string;
  state: ReplicaState;
  group: string;
  host: string;
  pid: number;
  session: string | null;
  procs: string | null;
  /** The name of the proc mesh `procs`. */
  mesh?: string | null;
  rank: number | null;
  actors: string | null;
  devices: string[];
  handlers: Record<string, string>;
  config: Record<string, unknown>;
  step: number | null;
  epoch: number | null;
  max_step: number | null;
  metrics: Record<string, MetricValue>;
  reported: number | null;
  phase: string;
  registered: number;
  changed: number;
  died_of: string | null;
  /** How it ended, by whom and why; null while it lives, and from a weaver that does not tell. */
  ending?: string | null;
  ended_by?: string | null;
  end_reason?: string | null;
  exit?: ProcessExit | null;
  injectable: boolean;
  /** Its place among the ranks that take commands at one step; null, or not there, if it takes them by itself. */
  cohort?: { id: string; rank: number; world: number } | null;
  /** The commands that nothing in its process carries out, with the reasons. */
  not_offered?: Record<string, string>;
  /** The addresses of its runs in trackers. */
  links?: Record<string, string>;
  /** The id of the run that it is in. */
  run?: string | null;
  connected: boolean;
  step_time: number | null;
  instance: string;
  seq: number;
  user: string;
}

/** The fields of a replica that a delta may have. */
export type ReplicaChange = Partial<
  Pick<ReplicaInfo, 'state' | 'step' | 'epoch' | 'max_step' | 'metrics' | 'phase' | 'reported' | 'connected' | 'handlers' | 'cohort' | 'links' | 'not_offered'>
>;

/** A metric of a run: the last, least and greatest value, and the step of the last one. */
export type RunSummary = [last: MetricValue, least: MetricValue, greatest: MetricValue, step: number | null];

/** A run of a training, as a list has it: `loom.weaver.run_views.RunInfo`. */
export interface Run {
  id: string;
  name: string;
  /** `running`, or how it ended. */
  state: string;
  user: string;
  session: string | null;
  groups: string[];
  reason: string | null;
  by: string | null;
  /** The replica that failed first. */
  first: string | null;
  began: number;
  ended: number | null;
  step: number | null;
  max_step: number | null;
  ranks: number;
  /** The number of living replicas in each state. */
  replicas: Partial<Record<ReplicaState, number>>;
  restarts: number;
  command: string[];
  commit: string | null;
  clean: boolean | null;
  tags: string[];
  note: string;
  archived: boolean;
  /** The run that it continues; details have its name. */
  parent: { run: string; name?: string; step?: number | null; kind?: 'branch' | 'restart' | 'requeue' } | null;
  config: Record<string, unknown>;
  summary: Record<string, RunSummary>;
  /** The fields of which a list has a part only. */
  left_out: string[];
}

/** Something that happened to a run. Its further fields depend on its kind. */
export interface RunMark {
  kind: string;
  time: number;
  /** The id of its first event. */
  event: number;
  step: number | null;
  [field: string]: unknown;
}

export interface RunDetails extends Run {
  /** The facts that the first process told. */
  start: Record<string, unknown>;
  metrics: string[];
  members: { replica: string; group: string; rank: number | null; host: string; state: string; step: number | null; ending: string | null; end_reason: string | null }[];
  timeline: RunMark[];
  /** The runs that continue this one. */
  children: { run: string; name: string; state: string; step: number | null; kind: string }[];
  marks_left_out: number;
}

/** A part of a curve without a gap; columns of the same length. */
export interface CurveSection {
  time: number[];
  step: (number | null)[];
  value: (number | null)[];
  low: (number | null)[];
  high: (number | null)[];
}

export interface RunCurves {
  run: string;
  metric: string;
  by: 'step' | 'time';
  /** The replicas that have the metric, and those of which the curves are made. */
  ranks: number;
  drawn?: number;
  /** The replica is null for the band of all ranks. */
  curves: { replica: string | null; sections: CurveSection[] }[];
  outliers: { replica: string; distance: number | null }[];
}

export interface DeviceStatus {
  utilization?: number | null;
  memory_used?: number | null;
  temperature?: number | null;
  power?: number | null;
  sm_clock?: number | null;
  memory_clock?: number | null;
  ecc_corrected?: number | null;
  ecc_uncorrected?: number | null;
  throttled?: string[];
  error?: string | null;
  xid?: unknown;
  time?: number;
  by?: string;
}

export interface DeviceInfo {
  uuid: string;
  state: DeviceStateName;
  kind: string;
  server: string;
  type: string;
  memory: number;
  reason: string | null;
  replicas: string[];
  status: DeviceStatus | null;
  user: string;
}

/** Something that happened. Its further fields depend on its kind. */
export interface WeaverEvent {
  id: number;
  time: number;
  kind: string;
  replica: string | null;
  cause?: number | null;
  [field: string]: unknown;
}

export interface FaultRecord {
  replica: string;
  reason: string;
  time: number;
  detected: number;
  registered: number | null;
  stepped: number | null;
}

export interface CoursePoint {
  time: number;
  seconds: Record<string, number>;
}

export interface GoodputRecord {
  job: string;
  since: number;
  until: number;
  replicas: number;
  ratio: number | null;
  seconds: Record<string, number>;
  faults: FaultRecord[];
  course: CoursePoint[];
  user: string;
}

export interface SessionInfo {
  name: string;
  state: string;
  client_connected: boolean;
  created_at: number;
  pid: number;
  operations: number;
  persist: boolean;
  user: string;
  shared: Record<string, string>;
  alive_because?: AliveBecause[];
  lives_until?: number | null;
}

export type AliveBecause = 'client' | 'run' | 'call' | 'replica' | 'persist' | 'linger';

export interface EndedSession {
  name: string;
  reason: string;
  exit_code: number | null;
  created_at: number;
  ended_at: number;
  user: string;
}

export interface WorkerInfo {
  address: string;
  reachable: boolean;
}

export interface Change {
  old: unknown;
  new: unknown;
  /** The values that bring back what was before, if the old value does not: it was a schedule's. */
  back?: Record<string, unknown>;
}

/** What a replica made of a command. */
export interface Acknowledgement {
  replica: string;
  ok: boolean;
  step: number | null;
  changes: Record<string, Change>;
  refused: Record<string, string>;
  reason: string | null;
  waiting: boolean;
  evidence: Record<string, unknown>;
  /** What the training program took to apply itself: keys of an update, or the command's kind. */
  taken: string[];
  time: number | null;
}

export type CommandKind =
  | 'update_config'
  | 'pause'
  | 'resume'
  | 'stop'
  | 'drain'
  | 'save'
  | 'evaluate'
  | 'deactivate_device'
  | 'reactivate';

export type PolicyAction = 'notify' | 'pause' | 'stop' | 'respawn';

export type Target = string | string[];

/** A job as the gateway sums it up. */
export interface Aggregate {
  group: string;
  session: string | null;
  user: string;
  replicas: number;
  living: number;
  states: Partial<Record<ReplicaState, number>>;
  step: number | null;
  max_step: number | null;
  /** Steps a second of the median running replica. */
  rate: number | null;
  /** The mean over the living replicas whose loss is finite. */
  loss: number | null;
  not_finite: number;
}

export interface Snapshot {
  type: 'snapshot';
  /** The feed and the position in it, from which a page goes on after a lost connection. */
  feed?: string;
  at?: number;
  status: WeaverStatus;
  replicas: ReplicaInfo[];
  /** The numbers by which frames name the replicas. */
  numbers?: number[];
  /** The order of states in frames. */
  states?: string[];
  devices: DeviceInfo[];
  policies?: Record<string, PolicyAction>;
  goodput?: GoodputRecord[];
  sessions?: SessionInfo[];
  workers?: WorkerInfo[];
  events?: WeaverEvent[];
}

export interface Delta {
  type: 'delta';
  at?: number;
  /** The subscribed ones, and those with other handlers. */
  replicas?: Record<string, ReplicaChange>;
  /** Jobs that have changed; null for one that is gone. */
  aggregates?: Record<string, Aggregate | null>;
  /** Replicas whose numbers may be given to others now. */
  forgotten?: string[];
  devices?: Record<string, DeviceStatus>;
  /** Devices without their `status`; null for one that was forgotten. */
  device_states?: Record<string, Omit<DeviceInfo, 'status'> | null>;
  policies?: Record<string, PolicyAction>;
  /** Jobs that have changed, without their `course`. */
  goodput?: GoodputRecord[];
  sessions?: SessionInfo[];
  workers?: WorkerInfo[];
}

export interface AcknowledgementMessage {
  type: 'acknowledgement';
  id: string;
  replica: string;
  ok: boolean;
  step?: number | null;
  old?: unknown;
  new?: unknown;
  changes?: Record<string, Change>;
  refused?: Record<string, string>;
  reason?: string | null;
  waiting?: boolean;
  evidence?: Record<string, unknown>;
  taken?: string[];
}

export type Incoming =
  | Snapshot
  | Delta
  | { type: 'event'; at?: number; event: WeaverEvent; info?: ReplicaInfo; number?: number }
  | { type: 'resumed'; feed: string; at: number }
  | { type: 'subscribed'; id: string }
  | { type: 'away'; reason: string }
  | { type: 'pong'; id?: string }
  | { type: 'error'; id: string | null; code: string; message: string }
  | { type: 'accepted'; id: string; command: string | null; replicas: string[] }
  | AcknowledgementMessage
  | { type: 'done'; id: string };

export type Outgoing =
  | { type: 'ping'; id: string }
  | { type: 'subscribe'; id: string; aggregates: boolean; columns: string[]; rows: string[]; devices: string[] }
  | { type: 'command'; id: string; kind: CommandKind; target?: Target; params: Record<string, unknown> }
  | { type: 'policy'; id: string; group: string; action: PolicyAction }
  | {
      type: 'inject';
      id: string;
      fault: string;
      target: Target;
      params: Record<string, unknown>;
      duration: number | null;
    }
  | { type: 'remove_fault'; id: string; injection: string };

export type Scope = 'view' | 'operate' | 'drive' | 'admin';

export interface Identity {
  user: string;
  name: string;
  scope: Scope;
  expires: number | null;
}

export type MetricPoint = [time: number, step: number | null, value: MetricValue];

export interface LogLine {
  time: number;
  mesh: string;
  rank: number | null;
  place: string;
  stream: string;
  text: string;
  /** Of a line that a function of `job.run` has printed: its id and name. */
  run?: number;
  run_name?: string;
}
