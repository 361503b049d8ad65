import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { Store } from '../src/lib/store.svelte';
import type { Aggregate, Incoming, Outgoing } from '../src/lib/types';
import { aggregate, device, event, replica, snapshot } from './objects';

let store: Store;
let sent: Outgoing[];

beforeEach(() => {
  vi.useFakeTimers();
  vi.setSystemTime(1_000_000_000);
  store = new Store(new URL('http://loom.test/'));
  store.identity = { user: 'ada', name: 'ada-laptop', scope: 'operate', expires: null };
  sent = [];
  vi.spyOn(store.gateway, 'send').mockImplementation((message) => {
    sent.push(message);
    return true;
  });
});

afterEach(() => {
  vi.useRealTimers();
  vi.restoreAllMocks();
});

function take(...messages: Incoming[]): void {
  for (const one of messages) store.handleWebSocketMessage(one);
  store.flush();
}

describe('a snapshot', () => {
  it('replaces everything', () => {
    take(snapshot({ replicas: [replica('a')] }), snapshot({ replicas: [replica('b')], policies: { train: 'pause' } }));
    expect([...store.replicas.keys()]).toEqual(['b']);
    expect(store.policies).toEqual({ train: 'pause' });
    expect(store.loaded).toBe(true);
  });

  it('works without the parts that an older gateway leaves out', () => {
    const { type, status, replicas, devices } = snapshot({ replicas: [replica('a')] });
    take({ type, status, replicas, devices });
    expect(store.replicas.size).toBe(1);
    expect(store.sessions).toEqual([]);
  });

  it('sets the clock by that of the weaver', () => {
    take(snapshot({ time: 1_000_000 + 60 }));
    expect(store.now).toBeCloseTo(1_000_060);
  });

  it('ends an absence of the weaver', () => {
    take(snapshot({}), { type: 'away', reason: 'it was killed' });
    expect(store.away).toBe('it was killed');
    take(snapshot({}));
    expect(store.away).toBeNull();
  });
});

describe('a delta', () => {
  it('changes fields and computes the pace', () => {
    take(snapshot({ replicas: [replica('a', { step: 10, reported: 100, step_time: null })] }));
    take({ type: 'delta', replicas: { a: { step: 14, reported: 102, metrics: { loss: 0.5 }, state: 'running' } } });
    const found = store.replica('a')!;
    expect(found.step).toBe(14);
    expect(found.pace).toBeCloseTo(0.5);
    expect(found.loss).toBe(0.5);
  });

  it('has texts for numbers that are not finite', () => {
    take(snapshot({ replicas: [replica('a')] }), { type: 'delta', replicas: { a: { metrics: { loss: 'NaN' } } } });
    expect(store.replica('a')!.loss).toBeNaN();
  });

  it('changes devices, their states, policies and goodput', () => {
    take(snapshot({ devices: [device('g')] }), {
      type: 'delta',
      replicas: {},
      devices: { g: { utilization: 0.4 } },
      device_states: { g: { ...device('g', { state: 'failed', reason: 'Xid 79', replicas: ['a'] }) }, h: null },
      policies: { '*': 'stop' },
      goodput: [],
      workers: [{ address: 'tcp://w:1', reachable: true }],
    });
    expect(store.devices[0]).toMatchObject({ state: 'failed', reason: 'Xid 79', status: { utilization: 0.4 } });
    expect(store.deviceStatus('g')).toEqual({ utilization: 0.4 });
    expect(store.deviceStatus('h')).toBeNull();
    expect(store.policies).toEqual({ '*': 'stop' });
    expect(store.workers).toHaveLength(1);
  });

  it('changes handlers, and forgets devices', () => {
    take(snapshot({ replicas: [replica('a')], devices: [device('g')] }), {
      type: 'delta',
      replicas: { a: { handlers: { rate: 'float' } } },
      device_states: { g: null },
    });
    expect(store.replica('a')!.handlers).toEqual({ rate: 'float' });
    expect(store.devices).toEqual([]);
  });

  it('replaces the goodput of its jobs alone, and keeps their timelines', async () => {
    const record = { since: 0, until: 1, replicas: 1, ratio: 0.5, seconds: {}, faults: [], course: [], user: 'ada' };
    take(snapshot({ goodput: [{ ...record, job: 'a' }, { ...record, job: 'b' }] }));
    const course = [{ time: 1, seconds: { compute: 1 } }];
    vi.spyOn(store.gateway, 'request').mockResolvedValue({ jobs: [{ ...record, job: 'a', course }] });
    await store.loadGoodput();
    take({ type: 'delta', replicas: {}, goodput: [{ ...record, job: 'a', ratio: 0.7 }] });
    expect(store.goodput.map((one) => [one.job, one.ratio, one.course.length])).toEqual([['a', 0.7, 1], ['b', 0.5, 0]]);
  });

  it('says nothing of a replica that is not known', () => {
    take(snapshot({}), { type: 'delta', replicas: { gone: { step: 1 } } });
    expect(store.replicas.size).toBe(0);
  });

  it('keeps live points of followed replicas alone', () => {
    take(snapshot({ replicas: [replica('a'), replica('b')] }));
    const leave = store.follow('a');
    for (let time = 1; time <= 3; time += 1)
      take({
        type: 'delta',
        replicas: { a: { reported: time, step: time, metrics: { loss: time } }, b: { reported: time, metrics: { loss: 1 } } },
      });
    expect([...store.livePoints('a', 'loss').values]).toEqual([1, 2, 3]);
    expect(store.livePoints('a', 'accuracy').times).toHaveLength(0);
    expect(store.livePoints('b', 'loss').times).toHaveLength(0);
    leave();
    expect(store.livePoints('a', 'loss').times).toHaveLength(0);
  });
});

describe('an event', () => {
  it('is kept once, and amended when it comes again', () => {
    take(snapshot({ events: [event(1, 'registered', 'a')] }));
    take({ type: 'event', event: event(2, 'stalled', 'a') }, { type: 'event', event: event(2, 'stalled', 'a', { stack: 'File' }) });
    expect(store.events.map((one) => one.id)).toEqual([1, 2]);
    expect(store.events[1]!['stack']).toBe('File');
  });

  it('changes the state of its replica at once', () => {
    take(snapshot({ replicas: [replica('a')] }), { type: 'event', event: event(2, 'failed', 'a', { reason: 'SIGKILL' }) });
    expect(store.replica('a')).toMatchObject({ state: 'failed', died_of: 'SIGKILL' });
  });

  it('says how its replica ended, and that another process has come', () => {
    const exit = { signal: 9, code: null, out_of_memory: true, last_lines: ['no room'] };
    take(snapshot({ replicas: [replica('a')] }));
    take({ type: 'event', event: event(2, 'failed', 'a', { reason: 'killed', ending: 'crashed', ended_by: null, exit }) });
    expect(store.replica('a')).toMatchObject({ ending: 'crashed', ended_by: null, end_reason: 'killed', exit });
    take({ type: 'event', event: event(3, 'finished', 'a', { reason: 'told to stop', ending: 'stopped', ended_by: 'ada' }) });
    expect(store.replica('a')).toMatchObject({ ending: 'stopped', ended_by: 'ada', end_reason: 'told to stop', exit: null });
    take({ type: 'event', event: event(4, 'registering', 'a') });
    expect(store.replica('a')).toMatchObject({ ending: null, ended_by: null, end_reason: null, exit: null });
  });

  it('that is amended later does not end the process that has come meanwhile', () => {
    take(snapshot({ replicas: [replica('a')] }));
    const failed = event(2, 'failed', 'a', { reason: 'gone' });
    take({ type: 'event', event: failed }, { type: 'event', event: event(3, 'running', 'a') });
    take({ type: 'event', event: { ...failed, reason: 'killed by SIGKILL' } });
    expect(store.replica('a')).toMatchObject({ state: 'running', ending: null });
  });

  it('brings a new replica with it', () => {
    take(snapshot({}), { type: 'event', event: event(2, 'registered', 'a'), info: replica('a') });
    expect(store.members.map((one) => one.id)).toEqual(['a']);
  });

  it('changes the configuration and the devices of its replica', () => {
    take(snapshot({ replicas: [replica('a', { devices: ['x'] })], devices: [device('x', { replicas: ['a'] }), device('y')] }));
    take(
      { type: 'event', event: event(2, 'config', 'a', { changes: { rate: { old: 1, new: 2 } } }) },
      { type: 'event', event: event(3, 'devices_changed', 'a', { added: ['y'], removed: ['x'] }) },
    );
    expect(store.replica('a')).toMatchObject({ config: { rate: 2 }, devices: ['y'] });
    expect(store.devices.map((one) => one.replicas)).toEqual([[], ['a']]);
  });

  it('puts a policy at the end: the newest glob wins', () => {
    take(snapshot({ policies: { a: 'stop', b: 'stop' } }), {
      type: 'event',
      event: event(2, 'policy', null, { group: 'a', action: 'pause', by: 'ada' }),
    });
    expect(Object.entries(store.policies)).toEqual([
      ['b', 'stop'],
      ['a', 'pause'],
    ]);
  });
});

describe('a command', () => {
  it('is only sent until it is acknowledged', () => {
    take(snapshot({ replicas: [replica('a', { config: { rate: 1 } })] }));
    const id = store.updateConfig(['a'], { rate: 2 });
    store.flush();
    expect(sent).toEqual([{ type: 'command', id, kind: 'update_config', target: ['a'], params: { rate: 2 } }]);
    expect(id).toMatch(/^[0-9a-f]{32}$/);
    expect(store.command(id)!.phase).toBe('sent');
    expect(store.replica('a')!.config).toEqual({ rate: 1 });

    take({ type: 'accepted', id, command: id, replicas: ['a'] });
    expect(store.command(id)!.phase).toBe('accepted');
    take({ type: 'acknowledgement', id, replica: 'a', ok: true, step: 7, changes: { rate: { old: 1, new: 2 } } });
    take({ type: 'done', id });
    const run = store.command(id)!;
    expect(run.phase).toBe('done');
    expect(run.acknowledgements.get('a')).toMatchObject({ ok: true, step: 7, changes: { rate: { old: 1, new: 2 } } });
  });

  it('shows an error with its message', () => {
    const id = store.pause('*');
    take({ type: 'error', id, code: 'scope', message: 'this token is of scope view' });
    expect(store.command(id)).toMatchObject({ phase: 'error', error: 'this token is of scope view' });
  });

  it('is sent again after a reconnect, unless it was answered', () => {
    take(snapshot({}));
    const first = store.pause('*');
    const second = store.resume('*');
    take({ type: 'done', id: first });
    sent.length = 0;
    take(snapshot({}));
    expect(sent.map((one) => (one as { id: string }).id)).toEqual([second]);
  });

  it('about a device is for those on it', () => {
    take(snapshot({}));
    const id = store.deactivate({ device: 'GPU-1' });
    expect(sent).toEqual([{ type: 'command', id, kind: 'deactivate_device', params: { device: 'GPU-1' } }]);
  });

  it('for many replicas names them shortly, or is refused', () => {
    const many = Array.from({ length: 4000 }, (_, at) => replica(`train_${at}@session-1234`, { rank: at }));
    take(snapshot({ replicas: [...many, replica('other', { group: 'eval' })] }));
    const ids = many.map((one) => one.id);
    store.pause(ids);
    store.pause([...ids, 'other']);
    expect(sent.map((one) => (one as { target?: unknown }).target)).toEqual(['train', '*']);
    const refused = store.pause(ids.slice(1));
    expect(sent).toHaveLength(2);
    expect(store.command(refused)!.error).toContain('too many');
  });

  it('that injects a fault into Loom itself is not sent twice', () => {
    take(snapshot({}));
    const id = store.inject('dead_weaver', '*', {}, null);
    sent.length = 0;
    take(snapshot({}));
    expect(sent).toEqual([]);
    vi.mocked(store.gateway.send).mockReturnValue(false);
    const lost = store.inject('dead_weaver', '*', {}, null);
    expect(store.command(id)!.phase).toBe('sent');
    expect(store.command(lost)!.phase).toBe('error');
  });

  it('of somebody else is known by its events', () => {
    take(
      snapshot({}),
      { type: 'event', event: event(5, 'command', null, { command: 'c1', do: 'pause', params: {}, target: '*', by: 'bob', replicas: 2 }) },
      { type: 'event', event: event(6, 'applied', 'a', { command: 'c1', do: 'pause', ok: true, step: 3, changes: {}, refused: {} }) },
      { type: 'event', event: event(7, 'refused', 'b', { command: 'c1', do: 'pause', ok: false, reason: 'busy' }) },
    );
    const [run] = store.commands;
    expect(run).toMatchObject({ kind: 'pause', by: 'bob', phase: 'done', mine: false, total: 2 });
    expect(run!.acknowledgements.get('b')).toMatchObject({ ok: false, reason: 'busy' });
  });

  it('can be taken back', () => {
    take(snapshot({}));
    const id = store.updateConfig('*', { rate: 2 });
    for (const [name, old] of [['a', 1], ['b', 1], ['c', 3]] as const)
      take({ type: 'acknowledgement', id, replica: name, ok: true, step: 1, changes: { rate: { old, new: 2 } } });
    sent.length = 0;
    store.takeBack(store.command(id)!);
    expect(sent).toMatchObject([
      { kind: 'update_config', target: ['a', 'b'], params: { rate: 1 } },
      { kind: 'update_config', target: ['c'], params: { rate: 3 } },
    ]);
  });
});

describe('replicas', () => {
  it('share what is equal of them', () => {
    take(snapshot({ replicas: [replica('a', { config: { rate: 1 } }), replica('b', { config: { rate: 1 } }), replica('c', { config: { rate: 2 } })] }));
    const [a, b, c] = [...store.replicas.values()].map((one) => one.config);
    expect([a === b, a === c]).toEqual([true, false]);
    take({ type: 'event', event: event(1, 'config_applied', 'a', { changes: { rate: { old: 1, new: 3 } } }) });
    expect([...store.replicas.values()].map((one) => one.config['rate'])).toEqual([3, 1, 2]);
  });
});

describe('jobs', () => {
  const train = aggregate({ replicas: 3, living: 2, states: { running: 2, failed: 1 }, step: 12, max_step: 100, loss: 2, rate: 2, not_finite: 1 });

  it('are as the gateway sums them up, the living ones first', () => {
    take(snapshot({}), { type: 'delta', aggregates: { 'train@s1': train, eval: aggregate({ group: 'eval', session: null, living: 0 }) } });
    expect(store.jobs.map((one) => one.name)).toEqual(['train@s1', 'eval']);
    expect(store.jobs[0]).toMatchObject({ name: 'train@s1', step: 12, maxStep: 100, loss: 2, rate: 2, living: 2, replicas: 3, notFinite: 1 });
    expect([...store.stateCounts]).toEqual([['running', 3], ['failed', 1]]);
  });

  it('change alone, and go', () => {
    take(snapshot({}), { type: 'delta', aggregates: { 'train@s1': train, eval: aggregate() } });
    take({ type: 'delta', aggregates: { 'train@s1': { ...train, loss: 1 } } }, { type: 'delta', aggregates: { eval: null } });
    expect(store.jobs.map((one) => [one.name, one.loss])).toEqual([['train@s1', 1]]);
  });

  it('stay over a snapshot while their replicas do', () => {
    take(snapshot({ replicas: [replica('a')] }), { type: 'delta', aggregates: { 'train@s1': train, eval: aggregate() } });
    take(snapshot({ replicas: [replica('a')] }));
    expect(store.jobs.map((one) => one.name)).toEqual(['train@s1']);
  });

  it('have a gap in their curves while none of them runs', () => {
    const tell = (given: Partial<Aggregate>): void => {
      vi.advanceTimersByTime(1000);
      take({ type: 'delta', aggregates: { 'train@s1': { ...train, loss: 1, rate: 2, ...given } } });
    };
    take(snapshot({}), { type: 'delta', aggregates: {} });
    for (const states of [{ running: 1 }, { paused: 1 }, { failed: 1 }, { recovering: 1 }, { running: 1 }]) tell({ states });
    expect([...store.jobs[0]!.losses.values]).toEqual([1, NaN, 1]);
    expect([...store.jobs[0]!.rates.values]).toEqual([2, NaN, 2]);
  });

  it('stay the same objects while nothing changes of them', () => {
    const ended = aggregate({ group: 'old', session: null, living: 0, states: { finished: 3 } });
    take(snapshot({}), { type: 'delta', aggregates: { 'train@s1': train, old: ended } });
    vi.advanceTimersByTime(1000);
    take({ type: 'delta', aggregates: {} }); // notes that the ended one takes no steps
    const [before, counts] = [store.jobs, store.stateCounts];
    vi.advanceTimersByTime(1000);
    take({ type: 'delta', aggregates: { 'train@s1': { ...train, loss: 1 } } });
    expect(store.jobs.map((one, at) => one === before[at])).toEqual([false, true]);
    expect(store.stateCounts).toBe(counts);
    expect(store.job('old')).toBe(before[1]);

    take({ type: 'delta', aggregates: { 'train@s1': { ...train, states: { running: 1, failed: 1 } } } });
    expect(store.stateCounts.get('failed')).toBe(1);
    take({ type: 'delta', goodput: [{ job: 'old', since: 0, until: 1, replicas: 3, ratio: 0.5, seconds: {}, faults: [], course: [], user: 'ada' }] });
    expect(store.job('old')?.goodput?.job).toBe('old');
  });

  it('have curves of the last minutes, and no longer ones', () => {
    take(snapshot({}), { type: 'delta', aggregates: { 'train@s1': train } });
    for (let second = 0; second < 1000; second += 1) {
      vi.advanceTimersByTime(1000);
      take({ type: 'delta', aggregates: second % 2 ? {} : { 'train@s1': { ...train, loss: second } } });
    }
    expect(store.jobs[0]!.losses).toHaveLength(900);
    expect(store.jobs[0]!.losses.values.at(-1)).toBe(998);
    expect(store.jobs[0]!.rates).toHaveLength(900);
  });
});

describe('controls', () => {
  it('say why they are disabled', () => {
    store.link = { state: 'open', since: 0, reason: '' };
    expect(store.whyDisabled).toBeNull();
    store.identity = { user: 'ada', name: 'ada', scope: 'view', expires: null };
    expect(store.whyDisabled).toContain('scope is view');
    store.identity = { user: 'ada', name: 'ada', scope: 'admin', expires: null };
    store.link = { state: 'lost', since: 0, reason: '' };
    expect(store.whyDisabled).toContain('connection');
  });
});
