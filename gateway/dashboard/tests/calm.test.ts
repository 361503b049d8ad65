/** Events folded, what somebody should look at first, and what the palette finds. */

import { describe, expect, it } from 'vitest';

import { concernsOf, type Seen } from '../src/lib/attention';
import { foldEvents } from '../src/lib/folding';
import { findItems, fit, verbOf, wordsOf, type PaletteItem } from '../src/lib/palette';
import type { WeaverEvent } from '../src/lib/types';
import { device, event, run } from './objects';

const applied = (id: number, replica: string, step: number, old: unknown = 0.01, more: Record<string, unknown> = {}): WeaverEvent =>
  event(id, 'applied', replica, { do: 'update_config', command: 'c', step, changes: { learning_rate: { old, new: 0.1 } }, ...more });

const texts = (events: readonly WeaverEvent[], most = 10): string[] =>
  foldEvents(events, most).map(({ replicas, text }) => (replicas.length > 1 ? `${replicas.length} ` : '') + text);

describe('events', () => {
  it('of replicas that did the same are one line', () => {
    const events = [...Array(8).keys()].map((rank) => applied(rank + 1, `train_${rank}@s`, rank === 3 ? 1753 : 1642 + rank));
    expect(texts(events)).toEqual(['8 applied learning_rate 0.01 → 0.1 at steps 1642 to 1753']);
    expect(foldEvents(events, 1)[0]).toMatchObject({ command: 'c', replicas: [...Array(8).keys()].map((rank) => `train_${rank}@s`) });
  });

  it('are folded across others that come between them, and not with another change', () => {
    const events = [
      applied(1, 'a_0', 5),
      event(2, 'stalled', 'b_0'),
      applied(3, 'a_1', 5),
      applied(4, 'a_2', 5, 0.01, { command: 'other' }),
      event(5, 'stalled', 'b_1'),
    ];
    expect(texts(events)).toEqual(['2 take no steps', 'applied update_config at step 5: learning_rate 0.01 → 0.1', '2 applied learning_rate 0.01 → 0.1 at step 5']);
  });

  it('say the new value alone if the old ones differ', () => {
    expect(texts([applied(1, 'a_0', 5), applied(2, 'a_1', 5, 0.5)])).toEqual(['2 applied learning_rate → 0.1 at step 5']);
  });

  it('of one replica are lines of their own, and those a while apart, and of another reason', () => {
    expect(texts([event(1, 'stalled', 'a_0'), event(2, 'stalled', 'a_0')])).toHaveLength(2);
    const late = { ...event(2, 'stalled', 'a_1'), time: 5000 };
    expect(texts([event(1, 'stalled', 'a_0'), late])).toHaveLength(2);
    const failed = ['SIGKILL', 'SIGSEGV'].map((reason, at) => event(at + 1, 'failed', `a_${at}`, { reason }));
    expect(texts(failed)).toEqual(['failed: SIGSEGV', 'failed: SIGKILL']);
  });

  it('are said of many', () => {
    const two = (kind: string, more: (at: number) => Record<string, unknown> = () => ({})): string[] => texts([0, 1].map((at) => event(at + 1, kind, `a_${at}`, more(at))));
    expect(two('registered', (at) => ({ host: `h${at}`, step: 9 * at }))).toEqual(['2 registered on 2 hosts at steps 0 to 9']);
    expect(two('registered', () => ({ host: 'h' }))).toEqual(['2 registered on h']);
    expect(two('failed', () => ({ reason: 'SIGKILL' }))).toEqual(['2 failed: SIGKILL']);
    expect(two('finished', () => ({ ending: 'completed' }))).toEqual(['2 finished, completed']);
    expect(two('draining', () => ({ reason: 'ada' }))).toEqual(['2 drain: ada']);
    expect(two('refused', () => ({ do: 'pause', command: 'c', reason: 'it has ended' }))).toEqual(['2 refused pause: it has ended']);
    expect(two('running', () => ({ from: 'registering' }))).toEqual([]); // it has registered
  });

  it('of a run stand for those of its replicas, but not for failures', () => {
    const events = [
      event(1, 'run_began', null, { run: 'r', name: 'sft' }),
      event(2, 'registered', 'sft_0', { group: 'sft', host: 'h' }),
      event(3, 'registered', 'other_0', { group: 'other', host: 'h' }),
      event(4, 'failed', 'sft_1', { reason: 'SIGKILL' }),
      event(5, 'finished', 'sft_0'),
      event(6, 'run_changed', null, { run: 'r', name: 'sft' }),
      event(7, 'run_ended', null, { run: 'r', name: 'sft', state: 'crashed', reason: 'SIGKILL' }),
    ];
    expect(texts(events)).toEqual(['crashed: SIGKILL', 'failed: SIGKILL', 'registered on h', 'began']);
    expect(foldEvents(events, 1)[0]!.tone).toBe('bad');
    expect(texts([event(1, 'run_ended', null, { name: 'a', state: 'stopped', by: 'ada' })])).toEqual(['was stopped by ada']);
    expect(texts([event(1, 'run_ended', null, { name: 'a', state: 'completed', reason: 'it made its last step' })])).toEqual(['is completed: it made its last step']);
  });

  it('are as many lines as asked for, and the last one is whole', () => {
    const events = [applied(1, 'a_0', 5), applied(2, 'a_1', 6), event(3, 'stalled', 'b'), event(4, 'paused', 'c')];
    expect(texts(events, 1)).toEqual(['is paused']);
    expect(texts(events, 3)).toEqual(['is paused', 'takes no steps', '2 applied learning_rate 0.01 → 0.1 at steps 5 to 6']);
  });

  it('of thousands of replicas take little time', () => {
    const events = [...Array(2000).keys()].map((at) => applied(at + 1, `a_${at}`, at));
    for (const one of events) one.time = 1000;
    expect(texts(events, 40)).toEqual(['2000 applied learning_rate 0.01 → 0.1 at steps 0 to 1999']);
  });
});

describe('what somebody should look at first', () => {
  const seen = (given: Partial<Seen>): string[][] =>
    concernsOf({ runs: [], devices: [], replicas: [], status: null, now: 10_000, ...given }).map(({ what, name, why }) => [what, name, why]);

  it('is nothing if all is well', () => {
    expect(seen({ runs: [run('a'), run('b', { state: 'completed', ended: 9000 }), run('c', { state: 'stopped', ended: 9000 })], devices: [device('g')] })).toEqual([]);
  });

  it('are runs that crashed lately, unless they were started again', () => {
    const crashed = { state: 'crashed', reason: 'out of memory', first: 'a_1@s', step: 7, ended: 9000 };
    expect(seen({ runs: [run('a', crashed)] })).toEqual([['crashed', 'a', 'out of memory, a_1 first, at step 7']]);
    expect(seen({ runs: [run('a', { id: 'later' }), run('a', crashed)] })).toEqual([]);
    expect(seen({ runs: [run('b'), run('a', crashed)] })).toHaveLength(1);
    expect(seen({ runs: [run('a', crashed)], now: 9000 + 25 * 3600 })).toEqual([]);
  });

  it('are runs that diverge or stall, devices, what drains, and a weaver that stores nothing, the worst first', () => {
    const found = seen({
      runs: [run('slow', { ranks: 2, replicas: { stalled: 1 } }), run('nan', { step: 9, summary: { loss: ['NaN', 1, 2, 9] } })],
      devices: [device('GPU-1', { state: 'failed', reason: 'Xid 79' }), device('GPU-2', { state: 'inactive' })],
      replicas: [0, 1].map((at) => ({ id: `t_${at}`, group: 't', state: 'draining', changed: 5 })),
      status: { weaver: 'w', started: 0, time: 0, replicas: {}, devices: 0, commands: 0, event: 0, reports: 0, undurable_since: 5, undurable_reason: 'disk full' },
    });
    expect(found.map(([what]) => what)).toEqual(['disk', 'diverged', 'stalled', 'failed', 'drains']);
    expect(found[1]).toEqual(['diverged', 'nan', 'loss is not a number, at step 9']);
    expect(found[4]).toEqual(['drains', 't', '2 replicas']);
  });
});

describe('the palette', () => {
  const item = (kind: PaletteItem['kind'], title: string, hint?: string): PaletteItem => ({ key: `${kind} ${title}`, kind, title, ...(hint ? { hint } : {}), act: () => undefined });
  const items = [item('view', 'Runs'), item('view', 'Replicas'), item('run', 'sft-llama', 'running best'), item('run', 'pre-run'), item('action', 'Pause sft-llama')];
  const found = (query: string): string[] => findItems(query, items).map((one) => one.title);

  it.each([
    ['run', ['Runs', 'pre-run', 'sft-llama']],
    ['pause sft', ['Pause sft-llama']],
    ['llama', ['sft-llama', 'Pause sft-llama']],
    ['best', ['sft-llama']],
    ['rplc', ['Replicas']],
    ['zzz', []],
    ['', ['Runs', 'Replicas', 'sft-llama', 'pre-run', 'Pause sft-llama']],
  ])('%j finds %o', (query, titles) => {
    expect(found(query)).toEqual(titles);
  });

  it('prefers beginnings of words', () => {
    const words = wordsOf('LLama');
    expect(fit(words, 'llama')).toBeGreaterThan(fit(words, 'sft-llama'));
    expect(fit(words, 'sft-llama')).toBeGreaterThan(fit(words, 'allamar'));
    expect(fit(words, 'alpaca')).toBe(0);
  });

  it('shows some of each kind', () => {
    const many = [...Array(50).keys()].map((at) => item('run', `train-${at}`));
    expect(findItems('train', [...many, item('job', 'train')])).toHaveLength(9);
  });

  it('reads commands to replicas', () => {
    expect(verbOf('pause train_0')).toEqual({ verb: 'pause', title: 'Pause', rest: 'train_0' });
    expect(verbOf(' Drain  a b')).toMatchObject({ verb: 'drain', rest: 'a b' });
    for (const text of ['pause', 'stop train_0', 'toString x', '']) expect(verbOf(text)).toBeNull();
  });
});
