import { flushSync } from 'svelte';
import { describe, expect, it, vi } from 'vitest';

import type { ReplicaInfo, Scope } from '../src/lib/types';
import { find, inBrowser, NoObserver, openPage } from './app';
import { aggregate, device, event, replica, run, snapshot } from './objects';

const HOSTILE = '<img src=x onerror=alert(1)>';

inBrowser();

async function open(hash: string, scope: Scope = 'operate'): Promise<HTMLElement> {
  return await openPage(
    hash,
    snapshot({
      time: Date.now() / 1000,
      replicas: [
        replica('train_0@s1', { handlers: { rate: 'float' }, config: { rate: 0.1 }, devices: ['GPU-1'], injectable: true }),
        replica(HOSTILE, { group: HOSTILE, host: HOSTILE, session: HOSTILE, state: 'failed', died_of: HOSTILE }),
        replica('x'.repeat(10_240)),
      ],
      devices: [device('GPU-1', { replicas: ['train_0@s1'], state: 'failed', reason: HOSTILE })],
      policies: { train: 'pause' },
      goodput: [
        {
          job: 'train@s1',
          since: 1,
          until: 100,
          replicas: 1,
          ratio: 0.9,
          seconds: { compute: 90, lost: 5, [HOSTILE]: 5 },
          faults: [{ replica: 'train_0@s1', reason: HOSTILE, time: 5, detected: 6, registered: null, stepped: null }],
          course: [{ time: 100, seconds: { compute: 90, lost: 10 } }],
          user: 'ada',
        },
      ],
      sessions: [
        {
          name: 's1',
          state: 'open',
          client_connected: true,
          created_at: 1,
          pid: 1,
          operations: 3,
          persist: false,
          user: HOSTILE,
          shared: { bob: 'view' },
          alive_because: ['run', 'linger'],
          lives_until: Date.now() / 1000 + 3599,
        },
      ],
      workers: [{ address: 'tcp://w:1', reachable: false }],
      events: [
        event(1, 'registered', HOSTILE, { host: HOSTILE }),
        event(2, 'command', null, { command: 'c', do: 'pause', params: {}, target: '*', by: HOSTILE, replicas: 1 }),
        event(3, 'applied', 'train_0@s1', { command: 'c', do: 'pause', ok: true, step: 4 }),
      ],
    }),
    scope,
  );
}

// The first test compiles the whole page.
vi.setConfig({ testTimeout: 30_000 });

describe('each view', () => {
  it.each([
    ['#/overview', 'Overview'],
    ['#/runs', 'Runs'],
    ['#/compare/a/b', 'Compare'],
    ['#/replicas', 'Replicas'],
    ['#/replicas/train_0%40s1', 'train_0'],
    [`#/replicas/${encodeURIComponent(HOSTILE)}`, HOSTILE],
    ['#/devices?device=GPU-1', 'Devices'],
    ['#/devices?by=replica', 'Devices'],
    ['#/steering?command=c', 'Steering'],
    ['#/goodput', 'Goodput'],
    ['#/chaos?fault=out_of_memory', 'Chaos'],
    ['#/sessions/s1', 'Sessions'],
  ])('%s shows what there is, and hostile names as text', async (hash, title) => {
    const page = await open(hash);
    expect(page.querySelector('h1')!.textContent.trim()).toBe(title);
    expect(page.querySelector('img')).toBeNull();
    expect(page.querySelector('[style*="url"]')).toBeNull();
  });

  it('is empty before anything came, and says so', async () => {
    const page = await open('#/nowhere');
    expect(page.querySelector('h1')!.textContent).toBe('Overview');
    expect(find('connection')!.dataset['state']).toBe('open');
  });
});

describe('a replica that has ended', () => {
  const exit = { signal: 9, code: null, out_of_memory: false, last_lines: [HOSTILE, 'no room'] };

  it.each([
    [{ state: 'failed', died_of: 'killed by SIGKILL', ending: 'crashed', exit }, 'Failed, crashed: killed by SIGKILL'],
    [{ state: 'failed', died_of: '', ending: 'lost' }, 'Failed, lost'],
    [{ state: 'finished', ending: 'stopped', ended_by: 'ada', end_reason: 'told to stop' }, 'Finished, stopped by ada: told to stop'],
    [{ state: 'finished', ending: 'ended early', end_reason: 'at step 3 of 9' }, 'Finished, ended early: at step 3 of 9'],
  ] as [Partial<ReplicaInfo>, string][])('says how, by whom, why and its last lines: %o', async (given, text) => {
    await open('#/replicas/gone');
    const { store } = await import('../src/lib/page');
    store.handleWebSocketMessage(snapshot({ replicas: [replica('gone', given)] }));
    store.flush();
    flushSync();
    expect(find('ending')!.textContent.replace(/[\s\u2068\u2069]+/g, ' ')).toContain(text);
    if (given.exit) expect(find('last-lines')!.textContent).toBe(`${HOSTILE}\nno room`);
    else expect(find('last-lines')).toBeNull();
  });

  it('is not told to have ended badly when it has made its steps', async () => {
    await open('#/replicas/gone');
    const { store } = await import('../src/lib/page');
    store.handleWebSocketMessage(snapshot({ replicas: [replica('gone', { state: 'finished', ending: 'completed' })] }));
    store.flush();
    flushSync();
    expect(find('ending')).toBeNull();
  });
});

describe('the overview', () => {
  it('counts the commands that wait for answers, and those that were refused', async () => {
    await open('#/overview');
    const { store } = await import('../src/lib/page');
    const given = { do: 'pause', params: {}, target: '*', by: 'ada', replicas: 1 };
    store.handleWebSocketMessage({ type: 'event', event: event(10, 'command', null, { ...given, command: 'waits' }) });
    store.handleWebSocketMessage({
      type: 'event',
      event: event(11, 'command', null, { ...given, command: 'refused', refused: { gone: 'it has ended' }, refused_more: 0 }),
    });
    store.flush();
    flushSync();
    expect(find('open-commands')!.textContent).toBe('1');
    expect(find('refused-commands')!.textContent).toBe('1 refused');
  });
});

describe('the curves of a job', () => {
  it('begin with what the weaver has, also of one value, and of the first metric like a loss', async () => {
    const asked: string[] = [];
    vi.stubGlobal('fetch', (url: URL) => {
      asked.push(decodeURIComponent(url.pathname));
      const section = { time: [7], step: [1], value: [0.5], low: [0.5], high: [0.5] };
      const living = run('train', { session: 's1', summary: { accuracy: [1, 1, 1, 1], 'train/loss': [1, 1, 1, 1] } });
      const body = url.pathname.includes('/curves/') ? { curves: [{ replica: null, sections: [section] }] } : { runs: [living] };
      return Promise.resolve(new Response(JSON.stringify(body), { headers: { 'content-type': 'application/json' } }));
    });
    const tell: (() => void)[] = [];
    vi.stubGlobal(
      'IntersectionObserver',
      class extends NoObserver {
        constructor(seen: (entries: object[]) => void) {
          super();
          tell.push(() => seen([{ isIntersecting: true }]));
        }
      },
    );
    await open('#/overview');
    const { store } = await import('../src/lib/page');
    store.handleWebSocketMessage({ type: 'delta', aggregates: { 'train@s1': aggregate() } });
    store.flush();
    flushSync();
    for (const one of tell) one();
    flushSync();
    await vi.waitFor(() => expect(find('job')!.textContent).toContain('train/loss (mean)'));
    expect(asked.some((url) => url.includes('/runs/id-train/curves/train/loss'))).toBe(true);
  });
});

describe('a row of the table of replicas', () => {
  it('is seldom updated while it is out of sight, and at once when it comes in sight', async () => {
    const tell: ((from: number, until: number) => void)[] = [];
    vi.stubGlobal(
      'IntersectionObserver',
      class extends NoObserver {
        constructor(seen: (entries: object[]) => void) {
          super();
          tell.push((top, bottom) => seen([{ isIntersecting: bottom > top, boundingClientRect: { top: 0 }, intersectionRect: { top, bottom } }]));
        }
      },
    );
    await open('#/replicas');
    const { store } = await import('../src/lib/page');
    const stepAfter = (change: () => void): string => {
      change();
      store.flush();
      flushSync();
      return find('replica-table')!.querySelector('[data-replica="train_0@s1"] td:nth-child(4)')!.textContent;
    };
    const report = (step: number): void =>
      store.handleWebSocketMessage({ type: 'delta', replicas: { 'train_0@s1': { step } } });
    const sight = (from: number, until: number): void => tell.forEach((one) => one(from, until));
    const place = [...find('replica-table')!.querySelectorAll('[data-replica], [data-job]')].findIndex(
      (one) => one instanceof HTMLElement && one.dataset['replica'] === 'train_0@s1',
    );
    store.now = 8000 - place + 1; // the row's turn was a second ago
    expect(stepAfter(() => report(101))).toBe('101');
    sight(2000, 2100);
    expect(stepAfter(() => report(102))).toBe('101');
    expect(stepAfter(() => (store.now += 7))).toBe('102');
    store.now += 1;
    expect(stepAfter(() => report(103))).toBe('102');
    expect(stepAfter(() => sight(0, 100))).toBe('103');
    expect(stepAfter(() => report(104))).toBe('104');
    const needs = vi.spyOn(store, 'need');
    expect(stepAfter(() => sight(0, 0))).toBe('104');
    store.now += 8;
    expect(stepAfter(() => report(105))).toBe('104');
    expect(needs).not.toHaveBeenCalled();
    expect(stepAfter(() => sight(0, 100))).toBe('105');
    expect(needs.mock.calls.flatMap(([need]) => need.rows)).toContain('train_0@s1');
  });
});

describe('a job on the overview', () => {
  it('is seldom updated while its card is out of sight, and at once when it comes in sight', async () => {
    const observers: ((isIntersecting: boolean) => void)[] = [];
    vi.stubGlobal(
      'IntersectionObserver',
      class extends NoObserver {
        constructor(tell: (entries: { isIntersecting: boolean }[]) => void) {
          super();
          observers.push((isIntersecting) => tell([{ isIntersecting }]));
        }
      },
    );
    await open('#/overview');
    const { store } = await import('../src/lib/page');
    const stepOf = (step: number): string => {
      store.handleWebSocketMessage({ type: 'delta', aggregates: { 'train@s1': aggregate({ step }) } });
      store.flush();
      flushSync();
      return /step (\d+)/.exec(find('job')!.textContent.replaceAll(/\s+/g, ' '))![1]!;
    };
    const sight = (seen: boolean): void => {
      for (const tell of observers) tell(seen);
      flushSync();
    };
    expect(stepOf(101)).toBe('101');
    sight(false);
    expect(stepOf(102)).toBe('101');
    store.now += 10;
    flushSync();
    expect(stepOf(103)).toBe('102');
    sight(true);
    expect(stepOf(103)).toBe('103');
  });
});

describe('a token of scope view', () => {
  it.each([
    ['#/steering', ['pause', 'resume', 'save', 'evaluate', 'drain', 'stop', 'apply', 'set-policy', 'take-back']],
    ['#/devices?device=GPU-1', ['deactivate', 'reactivate']],
    ['#/chaos', ['inject', 'victim']],
    ['#/sessions', ['end-session']],
  ])('%s has its controls disabled, with the reason', async (hash, controls) => {
    await open(hash, 'view');
    for (const one of controls) expect((find(one) as HTMLButtonElement).disabled, one).toBe(true);
    expect(find('why-disabled')!.textContent).toContain('scope operate');
  });

  it('is not needed to see that the same controls work for others', async () => {
    await open('#/steering');
    for (const one of ['pause', 'resume', 'stop', 'take-back']) expect((find(one) as HTMLButtonElement).disabled, one).toBe(false);
  });
});

describe('the frame', () => {
  it('shows the sign-in form with the reason', async () => {
    await open('#/overview');
    const { store } = await import('../src/lib/page');
    store.signedIn = false;
    store.signInMessage = 'the token was revoked';
    flushSync();
    expect(find('sign-in-error')!.textContent).toBe('the token was revoked');
  });

  it('shows at once that the connection or the weaver is away', async () => {
    await open('#/overview');
    const { store } = await import('../src/lib/page');
    store.link = { state: 'lost', since: Date.now(), reason: '' };
    flushSync();
    expect(find('lost')).not.toBeNull();
    store.link = { state: 'open', since: Date.now(), reason: '' };
    store.handleWebSocketMessage({ type: 'away', reason: 'it was killed' });
    flushSync();
    expect(find('lost')).toBeNull();
    expect(find('away')!.textContent).toContain('it was killed');
  });
});

describe('ten thousand replicas', () => {
  const ids = Array.from({ length: 10_000 }, (_, at) => `train_${at}@s1`);

  async function many(hash: string): Promise<void> {
    const { store } = await import('../src/lib/page');
    await open(hash);
    store.handleWebSocketMessage(snapshot({ replicas: ids.map((id, rank) => replica(id, { rank, step: rank })), numbers: [...ids.keys()] }));
    store.flush();
    flushSync();
  }

  const rows = (id: string): HTMLElement[] => [...find(id)!.querySelectorAll<HTMLElement>('tr[data-replica]')];

  it('have rows in the table only where they are seen, which are the ones that are subscribed', async () => {
    const { store } = await import('../src/lib/page');
    const need = vi.spyOn(store, 'need');
    await many('#/replicas?sort=-step&by=lag');
    expect(rows('replica-table').length).toBeLessThan(60);
    expect(rows('replica-table')[0]!.dataset['replica']).toBe('train_9999@s1');
    const needs = need.mock.calls.map(([one]) => one);
    expect(needs).toContainEqual({ columns: ['state', 'step'] });
    expect(needs.at(-1)!.rows).toEqual(rows('replica-table').map((one) => one.dataset['replica']));
  });

  it('have acknowledgements only where they are seen, those that refused first', async () => {
    await many('#/steering');
    const { store } = await import('../src/lib/page');
    find('pause')!.click();
    flushSync();
    const { id } = store.commands[0]!;
    store.handleWebSocketMessage({ type: 'accepted', id, command: id, replicas: ids });
    for (const one of ids.slice(0, 5000)) store.handleWebSocketMessage({ type: 'acknowledgement', id, replica: one, ok: true, step: 3 });
    store.handleWebSocketMessage({ type: 'acknowledgement', id, replica: ids[7000]!, ok: false, reason: 'busy' });
    store.flush();
    flushSync();
    expect(rows('acknowledgements').length).toBeLessThan(60);
    expect(rows('acknowledgements')[0]!.textContent).toContain('busy');
    expect(rows('acknowledgements')[1]!.textContent).toContain('no answer yet');
    expect(find('command-status')!.textContent).toContain('5,001 of 10,000 replicas answered');
  });

  it('have acknowledgements that say what the program took', async () => {
    await many('#/steering');
    const { store } = await import('../src/lib/page');
    find('pause')!.click();
    flushSync();
    const { id } = store.commands.find((one) => one.phase === 'sent')!;
    store.handleWebSocketMessage({ type: 'accepted', id, command: id, replicas: [ids[0]!] });
    store.handleWebSocketMessage({ type: 'acknowledgement', id, replica: ids[0]!, ok: true, step: 3, taken: ['pause'] });
    store.handleWebSocketMessage({ type: 'done', id });
    store.flush();
    flushSync();
    expect(rows('acknowledgements')[0]!.textContent).toContain('taken by the program');
    expect(find('command-status')!.textContent).toContain('taken by the program');
    expect(find('command-status')!.textContent).not.toContain('applied');
  });
});

describe('the table of runs', () => {
  it('has hostile names, keys and values as text, and keys move, select and compare', async () => {
    const hostile = { tags: [HOSTILE], config: { [HOSTILE]: HOSTILE }, summary: { [HOSTILE]: [1, 1, 1, 1] as const } };
    const listed = ['b', 'a'].map((name) => run(`${HOSTILE}${name}`, { ...hostile, id: name, state: 'completed', ended: 2000, config: { [HOSTILE]: `${HOSTILE}${name}` } } as object));
    vi.stubGlobal('fetch', () => Promise.resolve(new Response(JSON.stringify({ runs: listed }), { headers: { 'content-type': 'application/json' } })));
    const page = await open('#/runs');
    await vi.waitFor(() => expect(page.querySelectorAll('[data-run]')).toHaveLength(2));
    expect(page.querySelector('img')).toBeNull();
    expect(page.querySelector('[data-run="a"]')!.textContent).toContain(HOSTILE);
    const table = find('run-table')!;
    const press = (key: string, target: HTMLElement | Window = table): void => {
      target.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
      flushSync();
    };
    table.focus();
    flushSync();
    press('x');
    press('ArrowDown');
    press('x');
    expect(find('run-actions')!.textContent).toContain('2 selected');
    expect(table.getAttribute('aria-activedescendant')).toBe('run-row-1');
    press('c', window);
    expect(location.hash).toBe('#/compare/b/a');
  });

  it('is loaded again as a whole only when runs have changed', async () => {
    const asked: string[] = [];
    vi.stubGlobal('fetch', (url: string) => {
      if (String(url).includes('runs?')) asked.push(String(url).includes('state=running') ? 'living' : 'all');
      return Promise.resolve(new Response(JSON.stringify({ runs: [run('train', { id: 'a' })] }), { headers: { 'content-type': 'application/json' } }));
    });
    const { runs } = await import('../src/lib/runs.svelte');
    const { store } = await import('../src/lib/page');
    const page = await open('#/runs');
    await vi.waitFor(() => expect(page.querySelectorAll('[data-run]')).toHaveLength(1));
    expect(asked.at(-1)).toBe('all');
    const again = async (): Promise<string | undefined> => {
      const before = asked.length;
      const stop = runs.watch();
      flushSync();
      await vi.waitFor(() => expect(asked.length).toBeGreaterThan(before));
      stop();
      return asked.at(-1);
    };
    location.hash = '#/steering';
    window.dispatchEvent(new HashChangeEvent('hashchange'));
    flushSync();
    expect(await again()).toBe('living');
    store.handleWebSocketMessage({ type: 'event', event: event(9, 'run_changed', null, { run: 'a' }) });
    store.flush();
    expect(await again()).toBe('all');
  });
});
