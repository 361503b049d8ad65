import { flushSync } from 'svelte';
import { afterEach, beforeAll, beforeEach, describe, expect, it, vi } from 'vitest';

import { GatewayError } from '../src/lib/api';
import { endpointsIn, extentText, findMesh, Polled, visibleRows, type ActorMesh, type Elements, type ProcMesh, type SessionMeshes } from '../src/lib/meshes.svelte';
import { closePage, find, openPage, stubBrowser } from './app';
import { snapshot } from './objects';

const HOSTILE = '<img src=x onerror=alert(1)>';

function elements(given: Partial<Elements> = {}): Elements {
  return { counts: { alive: 2 }, states: ['alive', 'alive'], failures: [], ...given };
}

function actors(id: number, name: string, given: Partial<ActorMesh> = {}): ActorMesh {
  return { id, name, extent: { hosts: 1, gpus: 2 }, elements: elements(), stopped: false, class_name: 'Trainer', endpoints: [], ...given };
}

function procs(id: number, name: string, given: Partial<ProcMesh> = {}): ProcMesh {
  return { id, name, extent: { hosts: 1, gpus: 2 }, elements: elements(), stopped: false, actors: [], ...given };
}

function tree(below: ProcMesh[], given: Partial<SessionMeshes> = {}): SessionMeshes {
  return { hosts: { id: 0, name: 'hosts', extent: { hosts: 1 }, elements: elements(), stopped: false, procs: below }, left_out: 0, ...given };
}

const call = (name: string, rate: number, calls = 1) => ({ name, calls, failures: 0, in_flight: 0, calls_per_second: rate, p50: 0.001, p99: 0.25 });

const BUSY = tree([
  procs(1, 'workers', {
    actors: [actors(2, 'trainers', { endpoints: [call('step', 4), call('save', 0.1, 7)] }), actors(3, 'loaders', { endpoints: [call('next', 90)] })],
  }),
  procs(4, 'old', { stopped: true, elements: elements({ counts: { stopped: 2 }, states: ['stopped', 'stopped'] }), actors: [actors(5, 'gone', { stopped: true })] }),
]);

describe('a tree', () => {
  it('has a row for each mesh that is open, with its place', () => {
    const rows = visibleRows(BUSY, new Set());
    expect(rows.map((row) => [row.mesh.name, row.kind, row.level, row.parent, row.place, row.siblings, row.open])).toEqual([
      ['hosts', 'hosts', 1, null, 1, 1, true],
      ['workers', 'processes', 2, 0, 1, 2, true],
      ['trainers', 'actors', 3, 1, 1, 2, null],
      ['loaders', 'actors', 3, 1, 2, 2, null],
      ['old', 'processes', 2, 0, 2, 2, false],
    ]);
  });

  it('is toggled', () => {
    expect(visibleRows(BUSY, new Set([1, 4])).map((row) => row.mesh.name)).toEqual(['hosts', 'workers', 'old', 'gone']);
    expect(visibleRows(BUSY, new Set([0]))).toHaveLength(1);
  });

  it('has meshes by id, and the calls of what is on one, the busiest first', () => {
    expect(findMesh(BUSY, 5)?.name).toBe('gone');
    expect(findMesh(BUSY, 99)).toBeNull();
    expect(endpointsIn(BUSY.hosts).map((one) => one.endpoint.name)).toEqual(['next', 'step', 'save']);
    expect(endpointsIn(findMesh(BUSY, 2)!).map((one) => one.mesh.name)).toEqual(['trainers', 'trainers']);
  });

  it('has shapes as text', () => {
    expect(extentText({ hosts: 2, gpus: 8 })).toBe('hosts 2 × gpus 8');
    expect(extentText({})).toBe('');
  });
});

describe('what is polled', () => {
  beforeEach(() => void vi.useFakeTimers());

  afterEach(() => {
    vi.useRealTimers();
    vi.restoreAllMocks();
  });

  const settled = () => vi.advanceTimersByTimeAsync(0);

  it('is asked every two seconds until it is stopped', async () => {
    let asked = 0;
    const polled = new Polled<number>({ request: async <T>() => ++asked as T }, 'x');
    await settled();
    expect(polled.value).toBe(1);
    await vi.advanceTimersByTimeAsync(2000);
    expect(polled.value).toBe(2);
    polled.stop();
    await vi.advanceTimersByTimeAsync(20_000);
    expect(asked).toBe(2);
  });

  it('is not asked while the page is hidden, and at once when it is seen again', async () => {
    const hidden = vi.spyOn(document, 'hidden', 'get').mockReturnValue(false);
    let asked = 0;
    const polled = new Polled<number>({ request: async <T>() => ++asked as T }, 'x');
    await settled();
    hidden.mockReturnValue(true);
    await vi.advanceTimersByTimeAsync(60_000);
    expect(asked).toBe(1);
    hidden.mockReturnValue(false);
    document.dispatchEvent(new Event('visibilitychange'));
    await settled();
    expect(asked).toBe(2);
    polled.stop();
  });

  it('is asked once at a time, however long an answer takes', async () => {
    let asked = 0;
    const polled = new Polled<number>({ request: () => (asked++, new Promise(() => undefined)) }, 'x');
    await vi.advanceTimersByTimeAsync(60_000);
    document.dispatchEvent(new Event('visibilitychange'));
    await settled();
    expect(asked).toBe(1);
    polled.stop();
  });

  it('keeps the last answer when one fails, and says why', async () => {
    let fails = false;
    const request = async <T>(): Promise<T> => {
      if (fails) throw new GatewayError(503, 'driver_unavailable', 'it is busy');
      return 7 as T;
    };
    const polled = new Polled<number>({ request }, 'x');
    await settled();
    fails = true;
    await vi.advanceTimersByTimeAsync(2000);
    expect([polled.value, polled.error, polled.over]).toEqual([7, 'it is busy', false]);
    fails = false;
    await vi.advanceTimersByTimeAsync(2000);
    expect(polled.error).toBeNull();
    polled.stop();
  });

  it.each([404, 410])('is over when the answer is %i', async (status) => {
    let asked = 0;
    const request = async <T>(): Promise<T> => {
      asked += 1;
      throw new GatewayError(status, 'unknown_session', 'no session');
    };
    const polled = new Polled<number>({ request }, 'x');
    await vi.advanceTimersByTimeAsync(60_000);
    expect([polled.over, polled.error, asked]).toEqual([true, 'no session', 1]);
  });
});

describe('the view', () => {
  beforeAll(async () => {
    stubBrowser();
    await import('../src/App.svelte'); // the first time takes seconds
  }, 60_000);

  beforeEach(stubBrowser);

  afterEach(() => {
    closePage();
    vi.unstubAllGlobals();
  });

  const session = { state: 'open', client_connected: true, created_at: 1, pid: 1, operations: 3, persist: false, user: 'ada', shared: {} };

  /** Show a view while the gateway answers with an object, or with a status and an error. */
  async function open(hash: string, answer: unknown, status = 200, sessions = ['s1']): Promise<void> {
    vi.stubGlobal('fetch', async (url: URL) => {
      if (/\/(meshes|runs)$/.test(url.pathname)) return new Response(JSON.stringify(answer), { status });
      return await new Promise(() => undefined);
    });
    await openPage(hash, snapshot({ sessions: sessions.map((name) => ({ ...session, name })) }), 'view');
    await new Promise((resolve) => setTimeout(resolve, 0));
    await vi.waitFor(() => expect(document.querySelector('main')!.textContent).not.toContain('Loading'));
    flushSync();
  }

  const items = (): HTMLElement[] => [...find('mesh-tree')!.querySelectorAll<HTMLElement>('[role=treeitem]')];
  const press = (key: string): void => {
    document.activeElement!.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));
    flushSync();
  };

  it('moves in the tree by the arrow keys', async () => {
    await open('#/meshes/s1', BUSY);
    const focused = (): string => (document.activeElement as HTMLElement).dataset['name'] ?? '';
    items()[0]!.focus();
    for (const [key, at] of [
      ['ArrowDown', 'workers'],
      ['ArrowRight', 'trainers'],
      ['ArrowDown', 'loaders'],
      ['ArrowLeft', 'workers'],
      ['End', 'old'],
      ['ArrowRight', 'old'],
      ['ArrowRight', 'gone'],
      ['Home', 'hosts'],
      ['ArrowUp', 'hosts'],
    ] as const) {
      press(key);
      expect(focused(), key).toBe(at);
    }
    expect(items().map((one) => one.tabIndex).filter((one) => one === 0)).toHaveLength(1);
    press('ArrowLeft');
    expect(items()).toHaveLength(1);
    expect(items()[0]!.getAttribute('aria-expanded')).toBe('false');
  });

  it('shows the calls of the chosen mesh with units', async () => {
    await open('#/meshes/s1?mesh=2', BUSY);
    const rows = [...find('endpoints')!.querySelectorAll<HTMLElement>('tbody tr')];
    expect(rows.map((row) => row.dataset['endpoint'])).toEqual(['step', 'save']);
    expect(rows[0]!.textContent).toContain('1.0 ms');
    expect(rows[0]!.textContent).toContain('250 ms');
    expect(items().find((one) => one.dataset['mesh'] === '2')!.getAttribute('aria-selected')).toBe('true');
  });

  it('shows failed ranks by word and reason, and hostile names as text', async () => {
    const failed = elements({ counts: { alive: 1, failed: 1 }, states: ['alive', 'failed'], failures: [{ rank: 1, reason: HOSTILE }] });
    await open('#/meshes/s1?mesh=2', tree([procs(1, HOSTILE, { actors: [actors(2, HOSTILE, { elements: failed, class_name: HOSTILE, extent: { [HOSTILE]: 2 } })] })]));
    expect(find('mesh-failures')!.textContent).toContain(HOSTILE);
    expect(find('mesh-ranks')!.querySelector('[data-rank="1"]')!.textContent).toContain('failed');
    expect(find('mesh-states')!.textContent.replaceAll(/\s+/g, ' ')).toContain('1 failed');
    expect(document.querySelector('img')).toBeNull();
  });

  it('says what to do while nothing was spawned', async () => {
    await open('#/meshes/s1', tree([]));
    expect(document.body.textContent).toContain('No processes were spawned yet');
    expect(document.body.textContent).toContain('job.hosts.spawn_procs');
  });

  it('says that the driver is busy, and that a session is over', async () => {
    await open('#/meshes/s1', { error: { code: 'driver_unavailable', message: 'it is busy' } }, 503);
    expect(find('meshes-away')!.textContent).toContain('it is busy');
    expect(find('mesh-tree')).toBeNull();
  });

  it('says that a session does not live', async () => {
    await open('#/meshes/s9', { error: { code: 'unknown_session', message: 'no session named s9' } }, 404);
    expect(find('meshes-over')!.textContent).toContain('no session named s9');
  });

  it('has the only session without asking, and offers several', async () => {
    await open('#/meshes', BUSY);
    expect(items()).toHaveLength(5);
    closePage();
    await open('#/meshes', BUSY, 200, ['s1', 's2']);
    expect([...find('mesh-sessions')!.querySelectorAll('a')].map((one) => one.getAttribute('href'))).toEqual(['#/meshes/s1', '#/meshes/s2']);
  });

  it('of sessions lists the runs, and follows one', async () => {
    const run = { name: HOSTILE, started: 1, finished: null, trains: [] };
    const trains = [{ id: '3f2a9c', name: HOSTILE }];
    await open('#/sessions/s1', { runs: [{ ...run, id: 4, state: 'failed', finished: 3 }, { ...run, id: 9, state: 'running', trains }] });
    const rows = [...find('runs')!.querySelectorAll<HTMLElement>('tbody tr')];
    expect(rows.map((row) => row.dataset['state'])).toEqual(['running', 'failed']);
    expect(rows.map((row) => row.querySelector('a.training')?.getAttribute('href'))).toEqual(['#/runs/3f2a9c', undefined]);
    rows[0]!.querySelector<HTMLButtonElement>('[data-testid="follow-run"]')!.click();
    flushSync();
    expect(location.hash).toContain('run=9');
    expect(document.querySelector('img')).toBeNull();
  });
});
