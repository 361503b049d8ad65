import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { Store } from '../src/lib/store.svelte';
import { readFrame } from '../src/lib/store/frames';
import type { Incoming, Outgoing } from '../src/lib/types';
import { aggregate, event, frame, replica, snapshot, type GivenSection } from './objects';

type Subscribe = Extract<Outgoing, { type: 'subscribe' }>;

let store: Store;
let sent: Outgoing[];
let hidden: boolean;

beforeEach(() => {
  vi.useFakeTimers();
  vi.setSystemTime(1_000_000_000);
  hidden = false;
  vi.stubGlobal('WebSocket', FakeSocket);
  vi.stubGlobal('fetch', () => new Promise(() => undefined));
  vi.spyOn(document, 'hidden', 'get').mockImplementation(() => hidden);
  store = new Store(new URL('http://loom.test/'));
  store.identity = { user: 'ada', name: 'ada', scope: 'operate', expires: null };
  sent = [];
  vi.spyOn(store.gateway, 'send').mockImplementation((message) => {
    sent.push(message);
    return true;
  });
});

afterEach(() => {
  store.gateway.disconnect();
  vi.unstubAllGlobals();
  vi.useRealTimers();
  vi.restoreAllMocks();
});

function take(...messages: Incoming[]): void {
  for (const one of messages) store.handleWebSocketMessage(one);
  store.flush();
}

function frames(...sections: GivenSection[]): void {
  store.handleFrame(readFrame(frame(...sections)));
  store.flush();
}

class FakeSocket {
  static last: FakeSocket;
  readyState = 1;
  onopen: (() => void) | null = null;
  onclose: ((event: { code: number; reason: string }) => void) | null = null;

  constructor(readonly url: URL) {
    FakeSocket.last = this;
  }

  close(): void {}
}

/** Connect, as at first or after a lost connection. */
function open(): void {
  store.gateway.connect();
  FakeSocket.last.onopen!();
}

function lose(): void {
  FakeSocket.last.onclose!({ code: 1006, reason: '' });
}

/** Where the page would go on. */
function since(): string | null {
  lose();
  open();
  return FakeSocket.last.url.searchParams.get('since');
}

function subscriptions(): Omit<Subscribe, 'type' | 'id' | 'devices'>[] {
  return sent.filter((one) => one.type === 'subscribe').map(({ aggregates, columns, rows }) => ({ aggregates, columns, rows }));
}

const numbered = snapshot({
  feed: 'f',
  at: 5,
  replicas: [replica('a', { step: 1, metrics: { loss: 9 } }), replica('b', { connected: false }), replica('c')],
  numbers: [7, 0, 2],
  states: ['running', 'paused', 'failed'],
});

describe('a frame', () => {
  it('changes replicas by their numbers, and the states by the order of the snapshot', () => {
    take(numbered);
    frames(
      { column: 'state', numbers: [7, 0], values: [1, 0x82] },
      { column: 'step', numbers: [7], values: [12] },
      { column: 'loss', numbers: [7, 2], values: [null, NaN] },
      { column: 'pace', values: [0.5, null, 0.25] },
    );
    expect(store.replica('a')).toMatchObject({ state: 'paused', connected: true, step: 12, loss: null, pace: null });
    expect(store.replica('b')).toMatchObject({ state: 'failed', connected: false, step: null, pace: 0.5 });
    expect(store.replica('c')).toMatchObject({ state: 'running', connected: true, loss: NaN, pace: 0.25 });
  });

  it('is the same for replicas that components hold', () => {
    take(numbered);
    const held = store.members.find((one) => one.id === 'a')!;
    frames({ column: 'step', numbers: [7], values: [3] });
    expect(held.step).toBe(3);
    expect(store.replicas.get('a')).toBe(held);
  });

  it('may have holes, and numbers that nobody has', () => {
    take(numbered);
    frames({ column: 'state', values: [2, 0x7f, 1] }, { column: 'step', numbers: [4_000_000_000, 3], values: [1, 1] });
    expect([store.replica('b')!.state, store.replica('c')!.state]).toEqual(['failed', 'paused']);
    const many = Array.from({ length: 1000 }, (_, at) => at);
    frames({ column: 'step', values: many }, { column: 'state', values: many.map(() => 0) });
    expect(store.replica('a')!.step).toBe(7);
  });

  it('before a snapshot changes nothing', () => {
    frames({ column: 'step', values: [1, 2, 3] });
    expect(store.replicas.size).toBe(0);
  });
});

describe('what can wait', () => {
  it('is done together with the next change, or soon without one', () => {
    take(snapshot({}));
    const done: string[] = [];
    store.later(() => done.push('first'));
    vi.advanceTimersByTime(10);
    expect(done).toEqual([]);
    store.handleWebSocketMessage({ type: 'event', event: event(1, 'stalled', null) });
    vi.advanceTimersByTime(200);
    expect(done).toEqual(['first']);
    store.later(() => done.push('second'));
    vi.advanceTimersByTime(2000);
    expect(done).toEqual(['first', 'second']);
  });
});

describe('replicas', () => {
  it('come with numbers of their own', () => {
    take(numbered, { type: 'event', event: event(1, 'registered', 'd'), info: replica('d', { step: 4 }), number: 900 });
    frames({ column: 'step', numbers: [900], values: [5] });
    expect(store.replica('d')!.step).toBe(5);
    expect(store.replica('a')!.step).toBe(1);
  });

  it('are forgotten, and their numbers are given to others', () => {
    take(numbered, { type: 'delta', forgotten: ['a', 'unknown'] });
    expect(store.members.map((one) => one.id)).toEqual(['b', 'c']);
    expect(store.replica('a')).toBeNull();
    take({ type: 'event', event: event(1, 'registered', 'e'), info: replica('e'), number: 7 });
    frames({ column: 'step', numbers: [7], values: [2] });
    expect(store.replica('e')).toMatchObject({ state: 'running', connected: true, step: 2, loss: null });
  });

  it('are ordered anew where they belong', () => {
    const ids = (): string[] => store.members.map((one) => one.id);
    take(snapshot({ replicas: [replica('t0', { rank: 0 }), replica('t2', { rank: 2 }), replica('z', { group: 'z' })] }));
    expect(ids()).toEqual(['t0', 't2', 'z']);
    take(
      { type: 'event', event: event(1, 'registered', 't1'), info: replica('t1', { rank: 1 }) },
      { type: 'event', event: event(2, 'registered', 'b'), info: replica('b', { group: 'b' }) },
      { type: 'event', event: event(3, 'registered', 't0'), info: replica('t0', { rank: 9 }) },
    );
    expect(ids()).toEqual(['b', 't1', 't2', 't0', 'z']);
  });

  it('have the configuration of any event with changes', () => {
    take(numbered, { type: 'event', event: event(1, 'refused', 'a', { changes: { rate: { old: 1, new: 2 } }, refused: { other: 'no' } }) });
    expect(store.replica('a')!.config).toEqual({ rate: 2 });
  });
});

describe('a subscription', () => {
  beforeEach(() => {
    open();
    take(numbered);
    vi.advanceTimersByTime(1000);
    sent.length = 0;
  });

  it('is what all components need, sent once', () => {
    store.need({ columns: ['state'] });
    store.need({ columns: ['loss', 'state'], rows: ['a'] });
    const leave = store.follow('b');
    vi.advanceTimersByTime(40);
    expect(subscriptions()).toEqual([{ aggregates: true, columns: ['state', 'loss'], rows: ['a', 'b'] }]);
    leave();
    vi.advanceTimersByTime(1000);
    expect(subscriptions().at(-1)!.rows).toEqual(['a']);
  });

  it('is not sent again if nothing else is needed', () => {
    const leave = store.need({ columns: ['loss'] });
    vi.advanceTimersByTime(400);
    leave();
    store.need({ columns: ['loss'] });
    vi.advanceTimersByTime(400);
    expect(subscriptions()).toHaveLength(1);
  });

  it('changes only some times a second', () => {
    let leave = (): void => undefined;
    for (let time = 0; time < 2000; time += 20) {
      leave();
      leave = store.need({ rows: [`row-${time}`] });
      vi.advanceTimersByTime(20);
    }
    vi.advanceTimersByTime(400);
    expect(subscriptions().length).toBeLessThanOrEqual(8);
    expect(subscriptions().at(-1)!.rows).toEqual(['row-1980']);
  });

  it('has at most 200 rows, and fits into a message', () => {
    const leave = store.need({ rows: Array.from({ length: 300 }, (_, at) => `r${at}`) });
    vi.advanceTimersByTime(400);
    expect(subscriptions().at(-1)!.rows).toHaveLength(200);
    leave();
    store.need({ rows: ['x'.repeat(10_240), ...Array.from({ length: 200 }, (_, at) => String(at).padEnd(490, 'y'))] });
    vi.advanceTimersByTime(400);
    expect(JSON.stringify(sent.at(-1)).length).toBeLessThan(60_000);
    expect(subscriptions().at(-1)!.rows[0]).toMatch(/^0y/);
  });

  it('has the devices that are shown, and no others', () => {
    const withdraw = store.need({ devices: ['GPU-0', 'GPU-1'] });
    store.need({ devices: ['GPU-1'] });
    vi.advanceTimersByTime(400);
    withdraw();
    vi.advanceTimersByTime(400);
    const devices = sent.map((one) => (one.type === 'subscribe' ? one.devices : null));
    expect(devices).toEqual([['GPU-0', 'GPU-1'], ['GPU-1']]);
  });

  it('is for aggregates alone while the page is hidden, and for all when it is shown', () => {
    vi.spyOn(store.gateway, 'begin').mockResolvedValue();
    store.begin();
    store.need({ columns: ['loss'], rows: ['a'] });
    vi.advanceTimersByTime(400);
    hidden = true;
    document.dispatchEvent(new Event('visibilitychange'));
    vi.advanceTimersByTime(400);
    hidden = false;
    document.dispatchEvent(new Event('visibilitychange'));
    vi.advanceTimersByTime(400);
    const all = { aggregates: true, columns: ['loss'], rows: ['a'] };
    expect(subscriptions()).toEqual([all, { aggregates: true, columns: [], rows: [] }, all]);
  });

  it('of a row gives whole changes, whose pace is computed from the second one', () => {
    store.need({ rows: ['a'] });
    vi.advanceTimersByTime(400);
    const change = (step: number, reported: number): Incoming => ({ type: 'delta', replicas: { a: { step, reported, metrics: { loss: 1 } } } });
    take(change(1000, 500));
    expect(store.replica('a')).toMatchObject({ step: 1000, loss: 1, pace: null });
    take(change(1002, 501));
    expect(store.replica('a')!.pace).toBe(0.5);
  });

  it('that is refused is sent again without its rows, once', () => {
    store.need({ columns: ['state'], rows: ['a'] });
    vi.advanceTimersByTime(400);
    const { id } = sent.at(-1) as Subscribe;
    take({ type: 'error', id: 'other', code: 'x', message: '' }, { type: 'error', id, code: 'wrong_arguments', message: 'no such row' });
    expect(subscriptions().slice(1)).toEqual([{ aggregates: true, columns: ['state'], rows: [] }]);
    take({ type: 'error', id: (sent.at(-1) as Subscribe).id, code: 'wrong_arguments', message: 'no such column' });
    vi.advanceTimersByTime(1000);
    expect(subscriptions()).toHaveLength(2);
  });

  it('of the pace makes frames the only ones to change it', () => {
    store.need({ columns: ['pace'], rows: ['a'] });
    vi.advanceTimersByTime(400);
    frames({ column: 'pace', numbers: [7], values: [0.125] });
    for (const step of [10, 20]) take({ type: 'delta', replicas: { a: { step, reported: step } } });
    expect(store.replica('a')!.pace).toBe(0.125);
  });
});

describe('a lost connection', () => {
  const delta = (at: number): Incoming => ({ type: 'delta', at, aggregates: { j: aggregate() } });

  beforeEach(() => {
    open();
    take(numbered, delta(6));
    store.need({ columns: ['state', 'loss'], rows: ['a'] });
    vi.advanceTimersByTime(400);
    frames({ column: 'state', values: [0, 0, 0] });
    sent.length = 0;
  });

  it('goes on after the last message, with what had come whole as the first subscription', () => {
    take(delta(9));
    expect(since()).toBe('f.9');
    expect(subscriptions()).toEqual([
      { aggregates: true, columns: ['state'], rows: [] },
      { aggregates: true, columns: ['state', 'loss'], rows: ['a'] },
    ]);
  });

  it('keeps all that is known, and sends again commands without an answer', () => {
    const id = store.pause('*');
    lose();
    open();
    sent.length = 0;
    take({ type: 'resumed', feed: 'f', at: 6 }, { type: 'event', at: 7, event: event(2, 'paused', 'a') });
    expect(store.members).toHaveLength(3);
    expect(store.replica('a')!.state).toBe('paused');
    expect(sent.map((one) => (one as { id: string }).id)).toEqual([id]);
    expect(since()).toBe('f.7');
  });

  it('may be answered with a snapshot, which replaces all', () => {
    lose();
    open();
    sent.length = 0;
    take(snapshot({ feed: 'g', at: 1, replicas: [replica('n')], numbers: [0] }));
    expect([...store.replicas.keys()]).toEqual(['n']);
    expect(subscriptions()).toEqual([]); // it was subscribed when the socket opened
    expect(since()).toBe('g.1');
    expect(subscriptions()).toEqual([{ aggregates: true, columns: ['state', 'loss'], rows: ['a'] }]);
  });

  it('is no matter for needs that change meanwhile', () => {
    lose();
    store.need({ columns: ['pace'] });
    vi.advanceTimersByTime(1000);
    expect(sent).toEqual([]);
    open();
    expect(subscriptions().map((one) => one.columns)).toEqual([['state'], ['state', 'loss', 'pace']]);
  });

  it('begins anew with a gateway that says no position', () => {
    take(snapshot({ replicas: [replica('n')] }));
    expect(since()).toBeNull();
  });
});

it('an absent weaver that is back is subscribed to again, on the same socket', () => {
  open();
  store.need({ columns: ['state'] });
  take(numbered);
  vi.advanceTimersByTime(400);
  sent.length = 0;
  take({ type: 'away', reason: 'it was killed' }, snapshot({ feed: 'g', at: 0, replicas: [replica('a')], numbers: [0] }));
  expect(store.away).toBeNull();
  expect(subscriptions()).toEqual([
    { aggregates: false, columns: [], rows: [] },
    { aggregates: true, columns: ['state'], rows: [] },
  ]);
});

it('ten thousand acknowledgements are told to components some times a second', () => {
  vi.useRealTimers();
  const ids = Array.from({ length: 10_000 }, (_, at) => `r${at}`);
  take(snapshot({ replicas: ids.map((id) => replica(id, { config: { rate: 1 } })) }));
  const id = store.updateConfig('*', { rate: 2 });
  const told = vi.spyOn(window, 'requestAnimationFrame');
  store.handleWebSocketMessage({ type: 'accepted', id, command: id, replicas: ids });
  for (const [at, one] of ids.entries()) {
    const changes = { rate: { old: 1, new: 2 } };
    store.handleWebSocketMessage({ type: 'event', event: event(at + 1, 'applied', one, { command: id, step: 3, changes }) });
    store.handleWebSocketMessage({ type: 'acknowledgement', id, replica: one, ok: true, step: 3, changes });
  }
  store.handleWebSocketMessage({ type: 'done', id });
  expect(told.mock.calls.length).toBeLessThan(20);
  const run = store.command(id)!;
  expect([run.phase, run.applied.size, run.pending.size, run.undo.size]).toEqual(['done', 10_000, 0, 1]);
  expect(store.replica('r9999')!.config).toEqual({ rate: 2 });
  expect(store.events.length).toBeLessThanOrEqual(2000);
});

it.each([
  ['some', 10, 4],
  ['thousands of', 2000, 1],
])('components with the figures of %s replicas are told of them as often as fits', (_, count, times) => {
  const ids = Array.from({ length: count }, (_each, at) => `r${at}`);
  take(snapshot({ replicas: ids.map((id) => replica(id)) }));
  const rate = (): number | null => store.jobs[0]?.rate ?? null;
  const seen = new Set<number | null>();
  vi.advanceTimersByTime(2000);
  for (let at = 1; at <= 4; at += 1) {
    store.handleWebSocketMessage({ type: 'delta', aggregates: { train: aggregate({ rate: at }) } });
    vi.advanceTimersByTime(150);
    seen.add(rate());
  }
  expect(seen.size).toBe(times);
  vi.advanceTimersByTime(1000);
  expect(rate()).toBe(4);
});
