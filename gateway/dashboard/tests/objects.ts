/** Objects of the gateway for tests. */

import { Columns } from '../src/lib/store/columns';
import { COLUMNS, NONE, type Column } from '../src/lib/store/frames';
import type { Aggregate, DeviceInfo, ReplicaInfo, Run, Snapshot, WeaverEvent } from '../src/lib/types';

export function replica(id: string, given: Partial<ReplicaInfo> = {}): ReplicaInfo {
  return {
    id,
    state: 'running',
    group: 'train',
    host: 'node-1',
    pid: 1,
    session: 's1',
    procs: 'trainers',
    rank: 0,
    actors: null,
    devices: [],
    handlers: {},
    config: {},
    step: null,
    epoch: null,
    max_step: null,
    metrics: {},
    reported: null,
    phase: 'step',
    registered: 1,
    changed: 1,
    died_of: null,
    injectable: false,
    connected: true,
    step_time: null,
    instance: 'i',
    seq: 0,
    user: 'ada',
    ...given,
  };
}

export function run(name: string, given: Partial<Run> = {}): Run {
  return {
    id: `id-${name}`,
    name,
    state: 'running',
    user: 'ada',
    session: null,
    groups: [name],
    reason: null,
    by: null,
    first: null,
    began: 1000,
    ended: null,
    step: null,
    max_step: null,
    ranks: 1,
    replicas: {},
    restarts: 0,
    command: [],
    commit: null,
    clean: null,
    tags: [],
    note: '',
    archived: false,
    parent: null,
    config: {},
    summary: {},
    left_out: [],
    ...given,
  };
}

export function device(uuid: string, given: Partial<DeviceInfo> = {}): DeviceInfo {
  return {
    uuid,
    state: 'active',
    kind: 'gpu',
    server: 'node-1',
    type: 'H100',
    memory: 80 * 2 ** 30,
    reason: null,
    replicas: [],
    status: null,
    user: 'ada',
    ...given,
  };
}

export function event(id: number, kind: string, replica: string | null, data: Record<string, unknown> = {}): WeaverEvent {
  return { id, time: 1000 + id, kind, replica, ...data };
}

export function snapshot({ time = 1_000_000, ...given }: Partial<Omit<Snapshot, 'type' | 'status'>> & { time?: number }): Snapshot {
  return {
    type: 'snapshot',
    status: { weaver: 'w', started: 0, time, replicas: {}, devices: 0, commands: 0, event: 0, reports: 0 },
    replicas: [],
    devices: [],
    policies: {},
    goodput: [],
    sessions: [],
    workers: [],
    events: [],
    ...given,
  };
}

export function aggregate(given: Partial<Aggregate> = {}): Aggregate {
  return {
    group: 'train',
    session: 's1',
    user: 'ada',
    replicas: 1,
    living: 1,
    states: { running: 1 },
    step: null,
    max_step: null,
    rate: null,
    loss: null,
    not_finite: 0,
    ...given,
  };
}

type Value = number | null;

export interface GivenSection {
  column: Column;
  /** Without them the section is dense. */
  numbers?: number[];
  /** States as bytes. */
  values: Value[];
}

/** Return the bits of a 32-bit float; those of none for null. */
export function bitsOf(value: Value): number {
  return value === null ? NONE : new Uint32Array(Float32Array.of(value).buffer)[0]!;
}

/** Return a binary frame as the gateway makes it. */
export function frame(...sections: GivenSection[]): ArrayBuffer {
  const words: number[] = [1 | (1 << 8) | (sections.length << 16), 7];
  for (const { column, numbers, values } of sections) {
    const type = { state: 0, step: 1, loss: 2, pace: 2 }[column];
    words.push(COLUMNS.indexOf(column) | (type << 8) | (numbers ? 0 : 1 << 16), values.length, ...(numbers ?? []));
    if (column === 'state') {
      const bytes = new Uint8Array(Math.ceil(values.length / 4) * 4);
      bytes.set(values as number[]);
      words.push(...new Uint32Array(bytes.buffer));
    } else words.push(...values.map((one) => (column === 'step' ? (one ?? NONE) : bitsOf(one))));
  }
  return Uint32Array.from(words).buffer;
}

/** Return columns of replicas with the numbers 0, 1, 2, …. */
export function columnsOf(given: { state?: string; job?: string; step?: Value; loss?: Value; pace?: Value }[]): Columns {
  const columns = new Columns();
  columns.reserve(given.length - 1);
  given.forEach(({ state = 'running', job = 'j', step = null, loss = null, pace = null }, at) => {
    columns.setState(at, state);
    columns.setJob(at, job);
    columns.setStep(at, step);
    columns.setLoss(at, loss);
    columns.setPace(at, pace);
  });
  return columns;
}
