import { flushSync } from 'svelte';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import {
  kindsOf,
  lanePaths,
  MOST_LANES,
  OTHERS,
  scaleOf,
  secondsOf,
  sentenceOf,
  stepTimes,
  survey,
  unaccounted,
  waitingShare,
  type StepTimes,
  type Survey,
} from '../src/lib/lanes';
import type { Replica } from '../src/lib/store/replicas';
import { Steps } from '../src/lib/store/steps';
import type { Incoming, MetricValue, ReplicaInfo } from '../src/lib/types';
import { closePage, find, openPage, stubBrowser } from './app';
import { replica, snapshot } from './objects';

/** The metrics of a step. */
function times(whole: MetricValue | null, parts: Record<string, MetricValue> = {}, name = 'step'): Record<string, MetricValue> {
  const all = Object.entries(whole === null ? parts : { ...parts, [name]: whole });
  return Object.fromEntries(all.map(([part, seconds]) => [`time/${part}`, seconds]));
}

function member(id: string, metrics: Record<string, MetricValue>, given: Partial<ReplicaInfo> = {}): Replica {
  const info = replica(id, { metrics, session: null, group: id.replace(/_\d+$/, ''), ...given });
  return { ...info, job: info.group, number: 0, pace: null, loss: null };
}

const noSteps = (): StepTimes[] => [];
const ids = (found: Survey): string[] => found.lanes.map((one) => one.replica.id);
const look = (replicas: Replica[], before: Survey | null = null, turn = 0): Survey => survey(replicas, noSteps, before, turn);
const plain = (step: StepTimes | null) => step && { whole: step.whole, ...Object.fromEntries(step.parts) };

describe('the times of a step', () => {
  it('are those of the metrics time/…, with the whole step', () => {
    const step = stepTimes({ ...times(2, { wait_for_policy: 0.5, generate: 1.25 }), loss: 1, 'timely/x': 9 })!;
    expect(plain(step)).toEqual({ whole: 2, wait_for_policy: 0.5, generate: 1.25 });
    expect([waitingShare(step), unaccounted(step)]).toEqual([0.25, 0.25]);
  });

  it('are none of a replica without such metrics', () => {
    expect(stepTimes({})).toBeNull();
    expect(stepTimes({ loss: 1, step: 2 })).toBeNull();
  });

  it("leave out the trainer's parts in a report of the orchestrator", () => {
    const trainer = times(3, { wait_for_batch: 2, train: 1 }, 'trainer_step');
    const ratios = { 'perf/trainer/step_time_ratio/wait_for_batch': 0.6, 'perf/trainer/step_time_ratio/train': 0.3 };
    expect(plain(stepTimes({ ...trainer, ...ratios }))).toEqual({ whole: 3, wait_for_batch: 2, train: 1 });
    expect(plain(stepTimes({ ...trainer, ...ratios, ...times(2, { generate: 1.5 }) }))).toEqual({ whole: 2, generate: 1.5 });
  });

  it('of a step of length 0 are no share and no time', () => {
    const step = stepTimes(times(0, { wait_for_policy: 0 }))!;
    expect(plain(step)).toEqual({ whole: 0 });
    expect([waitingShare(step), unaccounted(step)]).toEqual([0, 0]);
    expect(lanePaths([step], ['wait_for_policy'], scaleOf([[step]]))).toEqual(['', '']);
  });

  it('that are longer than the step make it longer', () => {
    const step = stepTimes(times(1, { wait_for_policy: 3, generate: 1 }))!;
    expect([step.whole, waitingShare(step), unaccounted(step)]).toEqual([4, 0.75, 0]);
  });

  it('leave out values that are missing, negative or not finite', () => {
    expect(plain(stepTimes(times('NaN', { a: 'Infinity', b: -1, c: 2 })))).toEqual({ whole: 2, c: 2 });
    expect(plain(stepTimes(times(null, { wait_for_x: 1, d: 1 })))).toEqual({ whole: 2, wait_for_x: 1, d: 1 });
  });

  it('leave out a part of an older step, which does not fit into this one', () => {
    const before = times(2, { wait_for_policy: 1.5, generate: 0.5 });
    expect(plain(stepTimes(times(0.75, { wait_for_policy: 1.5, generate: 0.7 }), before))).toEqual({ whole: 0.75, generate: 0.7 });
    expect(plain(stepTimes(times(2, { wait_for_policy: 1.5, generate: 0.5 }), before))).toEqual({ whole: 2, wait_for_policy: 1.5, generate: 0.5 });
  });
});

describe('the newest steps', () => {
  const report = (steps: Steps, step: number | null, seconds: number) => steps.take(member('a', times(seconds), { step }));

  it('are kept of followed replicas alone, and no more than ten', () => {
    const steps = new Steps();
    expect(report(steps, 1, 1)).toBe(false);
    const leave = steps.follow('a');
    for (let step = 0; step < 100; step += 1) expect(report(steps, step, step + 1)).toBe(true);
    expect(steps.of('a').map((one) => one.whole)).toEqual([91, 92, 93, 94, 95, 96, 97, 98, 99, 100]);
    leave();
    expect(steps.of('a')).toEqual([]);
  });

  it('are counted once if a step is reported again', () => {
    const steps = new Steps();
    steps.follow('a');
    for (const [step, seconds] of [[1, 1], [2, 5], [2, 6], [null, 7], [null, 8]] as const) report(steps, step, seconds);
    expect(steps.of('a').map((one) => one.whole)).toEqual([1, 6, 7, 8]);
  });

  it('have none of a replica without times', () => {
    const steps = new Steps();
    steps.follow('a');
    expect(steps.take(member('a', { loss: 1 }))).toBe(false);
    expect(steps.of('a')).toEqual([]);
  });
});

describe('the sentence', () => {
  const orchestrator = (wait: number) => member('orchestrator', times(1, { wait_for_policy: wait, generate: 0.1 }));
  const trainers = (...waits: number[]) => waits.map((wait, at) => member(`trainer_${at}`, times(10, { wait_for_batch: wait }, 'trainer_step')));
  const sentence = (...replicas: Replica[]) => sentenceOf(look(replicas).reporters);

  it.each([
    ['The trainers wait 62 % of their step for batches.', [orchestrator(0.05), ...trainers(6, 6.4)]],
    ['The orchestrator waits 40 % of its step for weights.', [orchestrator(0.4), ...trainers(0.1, 0.2)]],
    ['The trainers wait 50 % of their step for batches, and the orchestrator waits 20 % of its step for weights.', [orchestrator(0.2), ...trainers(5, 5)]],
    ['Nobody waits for more than 10 % of a step.', [orchestrator(0.1), ...trainers(0, 0)]],
    ['trainer_0 waits 30 % of its step for batches.', trainers(3)],
    ['The replicas of pretrain wait 50 % of their step for the next shard.', [0, 1].map((at) => member(`pretrain_${at}`, times(2, { wait_for_the_next_shard: 1 })))],
    ['train_0 waits 50 % of its step for constructor.', [member('train_0', times(2, { wait_for_constructor: 1 }))]],
    ['The fitters wait 100 % of their step for something.', [0, 1].map((at) => member(`fitters_${at}`, times(null, { wait_: 1 })))],
  ])('is "%s"', (text, replicas) => expect(sentence(...replicas)).toBe(text));

  it('isolates a name that turns the direction of writing', () => {
    expect(sentence(member('\u202eevil', times(1, { wait_x: 1 })))).toBe('The \u2068\u202eevil\u2069 waits 100 % of its step for x.');
  });
});

describe('a survey', () => {
  const many = Array.from({ length: 10_000 }, (_, at) => member(`train_${at}`, times(1, { wait_for_batch: (at % 5000) / 10_000, train: 0.4 })));

  it('gives lanes to those that wait longest, in the order of all', () => {
    const found = look(many);
    expect(found.reporters).toHaveLength(10_000);
    expect(ids(found)).toEqual([...range(4992, 5000), ...range(9992, 10_000)].map((at) => `train_${at}`));
  });

  it('gives no more lanes if all wait as long', () => {
    expect(ids(look(many.map((one) => ({ ...one, metrics: times(1) }))))).toEqual(range(0, MOST_LANES).map((at) => `train_${at}`));
  });

  it('asks for some of the others each time, and for all of them in turn', () => {
    const hundred = many.slice(0, 100);
    const asked = range(0, 3).map((turn) => look(hundred, null, turn).asked);
    expect(asked.every((ids) => ids.length <= 32)).toBe(true);
    expect(new Set([...asked.flat(), ...ids(look(hundred))]).size).toBe(100);
  });

  it('leaves a replica its lane while no other waits clearly longer', () => {
    const waits = (at: number, share: number) => member(`r_${at}`, times(1, { wait_x: share }));
    const first = look(range(0, 17).map((at) => waits(at, at ? 0.5 : 0.49)));
    expect(ids(first)).not.toContain('r_0');
    expect(ids(look(range(0, 17).map((at) => waits(at, at ? 0.5 : 0.54)), first))).not.toContain('r_0');
    expect(ids(look(range(0, 17).map((at) => waits(at, at ? 0.5 : 0.56)), first))).toContain('r_0');
  });

  it('leaves out replicas that have ended, and knows of those without times that they are to be asked', () => {
    const found = look([member('a', times(1), { state: 'failed' }), member('b', { loss: 1 }), member('c', {})]);
    expect([found.reporters, found.lanes, found.asked]).toEqual([[], [], ['b', 'c']]);
  });
});

describe('a lane', () => {
  const step = (whole: number, parts: Record<string, number>): StepTimes => stepTimes(times(whole, parts))!;

  it('has a box for each part of each step, the newest on the right', () => {
    const [wait, work, rest] = lanePaths([step(2, { wait_x: 1, work: 1 }), step(4, { work: 3 })], ['wait_x', 'work'], 9.64);
    expect(wait).toBe('M396.0 0h100.0v20h-100.0z');
    expect(work).toBe('M600.0 0h300.0v20h-300.0zM496.0 0h100.0v20h-100.0z');
    expect(rest).toBe('M900.0 0h100.0v20h-100.0z');
  });

  it.each([[[], 1], [[0], 1], [[0.9], 1], [[3, 4.1], 8], [[101, 20], 150], [[0.002], 0.002]])('of steps of %j s is %d s long', (wholes, scale) => {
    expect(scaleOf([wholes.map((whole) => step(whole, {}))])).toBeCloseTo(scale, 9);
  });

  it('has colours for the parts that take longest; the others are one kind', () => {
    const parts = Object.fromEntries(range(0, 1000).map((at) => [`p${String(at).padStart(3, '0')}`, at + 1]));
    const all = step(1, parts);
    const kinds = kindsOf([all]);
    expect(kinds).toEqual([...range(993, 1000).map((at) => `p${at}`), OTHERS]);
    const seconds = secondsOf(all, kinds);
    expect([seconds.length, seconds[0], seconds.at(-1)]).toEqual([9, 994, 0]);
    expect(seconds.reduce((sum, one) => sum + one, 0)).toBe(all.whole);
  });
});

describe('the card', () => {
  beforeEach(() => {
    vi.useFakeTimers({ toFake: ['setInterval', 'clearInterval'] });
    stubBrowser();
    vi.stubGlobal('fetch', () => new Promise(() => undefined));
  });

  afterEach(() => {
    closePage();
    vi.useRealTimers();
    vi.restoreAllMocks();
    vi.unstubAllGlobals();
  });

  const infos = [
    replica('orchestrator', { group: 'orchestrator', session: null, step: 1, reported: 1, metrics: times(2, { wait_for_policy: 0.1, generate: 1.5 }) }),
    ...[0, 1].map((at) =>
      replica(`trainer_${at}`, { group: 'trainer', session: null, rank: at, step: 1, reported: 1, metrics: times(2, { wait_for_batch: 1, train: 1 }, 'trainer_step') }),
    ),
    replica('plain_0', { metrics: { loss: 1 } }),
  ];

  const lanes = (): HTMLElement[] => [...document.querySelectorAll<HTMLElement>('[data-testid="lane"]')];
  const picture = (id: string): SVGElement => lanes().find((one) => one.dataset['replica'] === id)!.querySelector('svg')!;
  const steps = (id: string): number => picture(id).querySelectorAll('path')[0]!.getAttribute('d')!.split('M').length - 1;

  async function take(message: Incoming): Promise<void> {
    const { store } = await import('../src/lib/page');
    store.handleWebSocketMessage(message);
    store.flush();
    flushSync();
  }

  /** Show lanes of replicas, with their first steps. */
  async function show(replicas: ReplicaInfo[], hash = '#/goodput'): Promise<void> {
    const { store } = await import('../src/lib/page');
    await openPage(hash, snapshot({ replicas, numbers: [...replicas.keys()] }), 'view');
    store.flush();
    flushSync();
  }

  it('has a lane for each replica with times, a sentence, and the same as a table', async () => {
    await show(infos);
    expect(find('who-waits')!.textContent).toBe('The trainers wait 50 % of their step for batches.');
    expect(lanes().map((one) => one.dataset['replica'])).toEqual(['orchestrator', 'trainer_0', 'trainer_1']);
    expect(picture('orchestrator').getAttribute('aria-label')).toBe('The last 1 step, 2 s on average: generate 1.50 s, wait_for_policy 100 ms, unaccounted 400 ms');
    expect(find('lanes-left-out')).toBeNull();
    expect(find('lanes-table')).toBeNull();
    const details = document.querySelector('details')!;
    details.open = true;
    details.dispatchEvent(new Event('toggle'));
    flushSync();
    const [row] = find('lanes-table')!.querySelectorAll('tbody tr');
    expect([...row!.querySelectorAll('td')].map((one) => one.textContent)).toEqual(['orchestrator', '5 %', '2 s', '1.50 s', '0 s', '0 s', '100 ms', '400 ms']);
  });

  it('hatches what is waiting, and nothing else', async () => {
    await show(infos);
    const fills = [...picture('trainer_0').querySelectorAll('path')].map((one) => one.getAttribute('fill')!.replace(/#.*-/, '#'));
    expect(fills).toEqual(['var(--c-0)', 'var(--c-1)', 'url(#2)', 'url(#3)', 'var(--unknown)']);
    expect(document.getElementById(/#(.+)\)/.exec(picture('trainer_0').querySelectorAll('path')[2]!.getAttribute('fill')!)![1]!)!.tagName).toBe('pattern');
  });

  it('takes steps as they come, and leaves the lanes of others as they are', async () => {
    const { store } = await import('../src/lib/page');
    const need = vi.spyOn(store, 'need');
    await show(infos);
    await take({ type: 'delta', replicas: { orchestrator: { step: 2, reported: 2, metrics: times(1.75, { wait_for_policy: 0.1, generate: 1.6 }) } } });
    expect(steps('orchestrator')).toBe(2);
    const changed: MutationRecord[] = [];
    const observer = new MutationObserver((records) => changed.push(...records));
    observer.observe(picture('trainer_0'), { subtree: true, attributes: true, childList: true });
    await take({ type: 'delta', replicas: { orchestrator: { step: 3, reported: 3, metrics: times(0.25, { generate: 0.2 }) } } });
    expect(steps('orchestrator')).toBe(3);
    expect(changed.concat(observer.takeRecords())).toEqual([]);
    const rows = need.mock.calls.flatMap(([one]) => one.rows ?? []);
    expect(new Set(rows)).toEqual(new Set(infos.map((one) => one.id)));
    vi.advanceTimersByTime(2000);
    flushSync();
    expect(find('who-waits')!.textContent).toBe('The trainers wait 50 % of their step for batches.');
  });

  it('is of one job in the view of that job, and away without times', async () => {
    await show(infos, '#/goodput?job=trainer');
    expect(lanes().map((one) => one.dataset['replica'])).toEqual(['trainer_0', 'trainer_1']);
    location.hash = '#/goodput?job=train@s1';
    window.dispatchEvent(new HashChangeEvent('hashchange'));
    flushSync();
    expect(find('lanes')).toBeNull();
  });

  it('comes when the first times come', async () => {
    await show([replica('train_0')]);
    expect(find('lanes')).toBeNull();
    await take({ type: 'delta', replicas: { train_0: { step: 1, reported: 2, metrics: times(1, { wait_x: 0.5 }) } } });
    vi.advanceTimersByTime(2000);
    flushSync();
    expect(find('who-waits')!.textContent).toBe('train_0 waits 50 % of its step for x.');
  });

  it('does nothing while the page is hidden or shows another view', async () => {
    const { store } = await import('../src/lib/page');
    await show(infos);
    const looked = vi.spyOn(store, 'members', 'get');
    const looks = (): number => {
      looked.mockClear();
      vi.advanceTimersByTime(10_000);
      flushSync();
      return looked.mock.calls.length;
    };
    expect(looks()).toBeGreaterThan(0);
    const hidden = vi.spyOn(document, 'hidden', 'get').mockReturnValue(true);
    expect(looks()).toBe(0);
    hidden.mockReturnValue(false);
    location.hash = '#/chaos';
    window.dispatchEvent(new HashChangeEvent('hashchange'));
    flushSync();
    expect(looks()).toBe(0);
  });

  it('draws sixteen of ten thousand, and names no more rows than a subscription may have', async () => {
    const many = Array.from({ length: 10_000 }, (_, at) => replica(`train_${at}`, { rank: at, metrics: times(1, { wait_for_batch: at / 10_000 }) }));
    const { store } = await import('../src/lib/page');
    const need = vi.spyOn(store, 'need');
    await show(many);
    expect(lanes().map((one) => one.dataset['replica'])).toEqual(range(9984, 10_000).map((at) => `train_${at}`));
    expect(find('lanes-left-out')!.textContent).toBe('Of 10,000 replicas these wait longest; 9,984 are left out.');
    expect(need.mock.calls.flatMap(([one]) => one.rows ?? []).length).toBeLessThanOrEqual(48);
    expect(document.querySelectorAll('[data-testid="lanes"] *').length).toBeLessThan(400);
  });
});

function range(from: number, until: number): number[] {
  return Array.from({ length: until - from }, (_, at) => from + at);
}
