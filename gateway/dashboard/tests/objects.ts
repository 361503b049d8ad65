/** Objects of the gateway for tests. */

import type { DeviceInfo, ReplicaInfo, Snapshot, WeaverEvent } from '../src/lib/types';

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
