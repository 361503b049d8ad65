import { flushSync } from 'svelte';
import { describe, expect, it, vi } from 'vitest';

import { configOf, linesOf, notOffered } from '../src/lib/ranks';
import { Replicas, type Replica } from '../src/lib/store/replicas';
import type { ReplicaInfo, Scope } from '../src/lib/types';
import { closePage, find, inBrowser, openPage } from './app';
import { aggregate, event, replica, snapshot } from './objects';

/** The ranks of a job, each with what is given of it. */
function ranks(job: string, ...given: Partial<ReplicaInfo>[]): ReplicaInfo[] {
  return given.map((one, rank) => replica(`${job}_${rank}`, { group: job, session: null, rank, ...one }));
}

function held(...infos: ReplicaInfo[]): readonly Replica[] {
  const replicas = new Replicas();
  replicas.replace(infos, undefined, undefined);
  return replicas.ordered;
}

const numbered = (amount: number): Partial<ReplicaInfo>[] => Array.from({ length: amount }, () => ({}));

describe('what is not offered', () => {
  const save = { not_offered: { save: 'no' } };
  const two = { id: 'c', world: 2 };

  it.each([
    ['by one of several that take commands alone is offered', [save, {}], {}],
    ['by none of them is not', [save, save], { save: 'no' }],
    ['by one rank of a job is not', [{ ...save, cohort: { ...two, rank: 0 } }, { cohort: { ...two, rank: 1 } }], { save: 'no' }],
    ['by one job of several is offered', [{ ...save, cohort: { ...two, rank: 0 } }, { cohort: { ...two, rank: 1 } }, {}], {}],
    ['by any of several jobs is not', [{ ...save, cohort: { ...two, rank: 0 } }, { cohort: { ...two, rank: 1 } }, save], { save: 'no' }],
  ] as [string, Partial<ReplicaInfo>[], Record<string, string>][])('%s', (_, given, refused) => {
    expect(notOffered(held(...ranks('ddp', ...given)))).toEqual(refused);
  });
});

describe('the lines of a table', () => {
  const look = (replicas: readonly Replica[], ...turned: string[]): string[] =>
    linesOf(replicas, new Set(turned)).map((one) => (one.job === null ? one.replica.id : `${one.job}: ${one.ranks.length}${one.open ? '' : ', closed'}`));

  it('have a job of several ranks with its ranks below it, and one of a single rank by itself', () => {
    expect(look(held(...ranks('ddp', {}, {}), ...ranks('one', {})))).toEqual(['ddp: 2', 'ddp_0', 'ddp_1', 'one_0']);
  });

  it('leave out the ranks of a job that was closed, or that is closed at first because it has many', () => {
    const replicas = held(...ranks('big', ...numbered(9)), ...ranks('ddp', {}, {}));
    expect(look(replicas)).toEqual(['big: 9, closed', 'ddp: 2', 'ddp_0', 'ddp_1']);
    expect(look(replicas, 'ddp')).toEqual(['big: 9, closed', 'ddp: 2, closed']);
    expect(look(replicas, 'big')).toHaveLength(1 + 9 + 1 + 2);
  });
});

describe('the configuration of ranks', () => {
  it('is one value where they agree, and each rank’s where they do not', () => {
    const handlers = { learning_rate: 'float' };
    const rows = configOf(held(...ranks('ddp', { handlers, config: { learning_rate: 0.1, seed: 1 } }, { handlers, config: { learning_rate: 0.1, seed: 2 } })));
    expect(rows).toEqual([
      { key: 'learning_rate', type: 'float', value: 0.1, differing: null, schedule: undefined },
      { key: 'seed', type: null, value: 1, differing: [['ddp_0', 1], ['ddp_1', 2]], schedule: undefined },
    ]);
  });

  it('has the schedule’s value beside the one that was set in its place', () => {
    const config = { learning_rate: 0.05, learning_rate_schedule: 0.0123, lonely_schedule: 'cosine' };
    expect(configOf(held(...ranks('ddp', { config }, { config })))).toMatchObject([
      { key: 'learning_rate', value: 0.05, schedule: 0.0123 },
      { key: 'lonely_schedule', value: 'cosine', schedule: undefined },
    ]);
  });
});

describe('a job of several ranks on the page', () => {
  inBrowser();

  async function open(hash: string, scope: Scope = 'operate'): Promise<void> {
    const handlers = { learning_rate: 'float' };
    await openPage(
      hash,
      snapshot({
        time: Date.now() / 1000,
        replicas: ranks(
          'ddp',
          { handlers, run: 'r7', config: { learning_rate: 0.05, learning_rate_schedule: 0.1, seed: 1 } },
          { handlers, config: { learning_rate: 0.05, learning_rate_schedule: 0.1, seed: 2 } },
          { state: 'failed' },
        ),
        events: [event(1, 'registered', 'ddp_0')],
      }),
      scope,
    );
    const { store } = await import('../src/lib/page');
    store.handleWebSocketMessage({
      type: 'delta',
      aggregates: { ddp: aggregate({ session: null, group: 'ddp', replicas: 3, living: 2, step: 400, max_step: 1000, rate: 10, loss: 0.5, states: { running: 2, failed: 1 } }) },
    });
    store.flush();
    flushSync();
  }

  const row = (job: string): HTMLElement | null => document.querySelector(`tr[data-job="${job}"]`);

  it('is one row with what it makes, and the time that is left', async () => {
    await open('#/replicas');
    const text = row('ddp')!.textContent.replaceAll(/\s+/g, ' ');
    for (const one of ['ddp', '3 ranks', '2 running', '1 failed', '400', '0.5', '1 min left']) expect(text).toContain(one);
    expect(document.querySelectorAll('tr[data-replica]')).toHaveLength(3);
    row('ddp')!.querySelector<HTMLButtonElement>('.turn')!.click();
    flushSync();
    expect(document.querySelectorAll('tr[data-replica]')).toHaveLength(0);
    expect(row('ddp')!.querySelector('.turn')!.getAttribute('aria-expanded')).toBe('false');
  });

  it('is selected with all of its ranks, and no row of its own in a search', async () => {
    await open('#/replicas');
    row('ddp')!.querySelector<HTMLInputElement>('input')!.click();
    flushSync();
    expect(find('selection')!.textContent).toContain('3 selected');
    location.hash = '#/replicas?q=ddp_1';
    window.dispatchEvent(new HashChangeEvent('hashchange'));
    flushSync();
    expect(row('ddp')).toBeNull();
  });

  it('has a view with its figures and its configuration, where an override is told from the schedule', async () => {
    await open('#/overview/ddp');
    expect(find('job-figures')!.textContent).toMatch(/step\s*400\s*of 1,000/);
    const config = find('job-config')!.textContent.replaceAll(/\s+/g, ' ');
    expect(config).toMatch(/learning_rate\s*0.05\s*override\s*0.1/);
    expect(config).toMatch(/ddp_0: 1\s*ddp_1: 2/);
    expect(find('to-run')!.getAttribute('href')).toBe('#/runs/r7');
  });

  it('has links to its runs in trackers where these are pages, and says where files are', async () => {
    const cohort = { id: 'c', rank: 1, world: 2 };
    const links = { mlflow: 'https://mlflow.example/#/runs/7', tensorboard: 'file://host/logs', evil: 'javascript:alert(1)' };
    for (const hash of ['#/overview/ddp', '#/replicas/ddp_1']) {
      await open(hash);
      const { store } = await import('../src/lib/page');
      expect(find('run-link')).toBeNull();
      store.handleWebSocketMessage({ type: 'delta', replicas: { ddp_1: { links, cohort } } });
      store.flush();
      await vi.waitFor(() => expect(find('run-link')).not.toBeNull());
      const shown = [...document.querySelectorAll('[data-testid="run-link"]')];
      expect(shown.map((one) => one.querySelector('a')?.getAttribute('href') ?? one.textContent.replaceAll(/\s+/g, ' ').trim())).toEqual([
        'https://mlflow.example/#/runs/7',
        'tensorboard: file://host/logs',
        'evil: javascript:alert(1)',
      ]);
      closePage();
    }
  });

  it('is commanded as a whole: a rank that takes commands with others shows the way to it', async () => {
    await open('#/replicas/ddp_1');
    expect(find('why-disabled')).toBeNull();
    const { store } = await import('../src/lib/page');
    store.handleWebSocketMessage({ type: 'delta', replicas: { ddp_1: { cohort: { id: 'c', rank: 1, world: 2 } } } });
    store.flush();
    await vi.waitFor(() => expect(find('all-ranks')!.getAttribute('href')).toBe('#/overview/ddp'));
    expect([...document.querySelectorAll<HTMLButtonElement>('.row .button')].every((one) => one.disabled)).toBe(true);
  });

  it('shows the schedule of a rank, too', async () => {
    await open('#/replicas/ddp_0');
    expect(find('config')!.textContent.replaceAll(/\s+/g, ' ')).toMatch(/learning_rate\s*0.05\s*override\s*0.1\s*float/);
  });

  it.each(['#/overview/ddp', '#/replicas/ddp_0'])('%s has no button that a reader could only fail with', async (hash) => {
    await open(hash, 'view');
    const buttons = [...document.querySelectorAll<HTMLButtonElement>('main .row .button')];
    expect(buttons.length).toBeGreaterThan(3);
    expect(buttons.every((one) => one.disabled)).toBe(true);
    expect(find('why-disabled')!.textContent).toContain('scope is view');
  });

  it('is paused on all ranks that live', async () => {
    await open('#/overview/ddp');
    const { store } = await import('../src/lib/page');
    find('pause')!.click();
    flushSync();
    expect(store.commands[0]).toMatchObject({ kind: 'pause', target: ['ddp_0', 'ddp_1'] });
  });

  it('offers what all of its ranks do, with the reason for what they do not, until one does', async () => {
    await open('#/overview/ddp');
    const { store } = await import('../src/lib/page');
    const tell = (not_offered: Record<string, string>): void => {
      store.handleWebSocketMessage({ type: 'delta', replicas: { ddp_0: { not_offered }, ddp_1: { not_offered } } });
      store.flush();
    };
    tell({ save: 'nothing here saves' });
    await vi.waitFor(() => expect(find('save')).toMatchObject({ disabled: true, title: 'nothing here saves' }));
    expect(find('evaluate')).toMatchObject({ disabled: false });
    expect(find('not-offered')!.textContent).toContain('nothing here saves');

    tell({});
    await vi.waitFor(() => expect(find('save')).toMatchObject({ disabled: false }));
    expect(find('not-offered')).toBeNull();
  });

  it('is steered by what it offers, with the reason for what it does not beside the controls', async () => {
    await open('#/steering?target=ddp');
    const { store } = await import('../src/lib/page');
    const not_offered = { save: 'nothing here saves', update_config: 'it looks at nothing' };
    store.handleWebSocketMessage({ type: 'delta', replicas: { ddp_0: { not_offered }, ddp_1: { not_offered } } });
    store.flush();
    for (const [control, title] of [['save', 'nothing here saves'], ['key', 'it looks at nothing'], ['value', 'it looks at nothing'], ['apply', 'it looks at nothing']] as const) {
      await vi.waitFor(() => expect(find(control), control).toMatchObject({ disabled: true, title }));
      expect(find(control)!.getAttribute('aria-describedby')).toBe(find('not-offered')!.id);
    }
    expect(find('pause')).toMatchObject({ disabled: false });
    expect(find('not-offered')!.textContent).toBe('Not offered: nothing here saves; it looks at nothing');
  });

  it('that nobody knows is said to be unknown', async () => {
    await open('#/overview/other');
    expect(document.body.textContent).toContain('No job has this name');
  });
});
