import { flushSync } from 'svelte';
import { afterEach, beforeAll, beforeEach, describe, expect, it, vi } from 'vitest';

import { barsPath, found, HEIGHT, linePath, WIDTH, type SessionTensors, type WatchedTensor } from '../src/lib/watched';
import { closePage, find, openPage, stubBrowser } from './app';
import { snapshot } from './objects';

const HOSTILE = '<img src=x onerror=alert(1)>';

const values = (given = {}) => ({ norm: 1.5, mean: 0.25, std: 0.5, min: -1, max: 2, nonfinite: 0, histogram: [1, 0, 4], ...given });

function tensor(name: string, given: Partial<WatchedTensor> = {}): WatchedTensor {
  const norms = { steps: [1, 2, 3], weight_norms: [1, 2, 1.5], grad_norms: [3, null, 1] };
  return { mesh: 'tensors', name, gradients: 3, trouble: '', time: 100, ...norms, weight: values(), grad: values({ norm: 0.125 }), ...given };
}

describe('tensors', () => {
  it('are in the order of their names, with numbers as such', () => {
    const all = ['layer10', 'layer2', 'Layer1'].map((name) => tensor(name));
    expect(found(all, '').map((one) => one.name)).toEqual(['Layer1', 'layer2', 'layer10']);
    expect(found(all, ' LAYER1 ').map((one) => one.name)).toEqual(['Layer1', 'layer10']);
    expect(all.map((one) => one.name)).toEqual(['layer10', 'layer2', 'Layer1']);
  });
});

describe('a line', () => {
  it('goes from the first step to the last, by their numbers', () => {
    expect(linePath([0, 10, 40], [0, 1, 0.5])).toBe(`M0 46L${WIDTH / 4} 2L${WIDTH} 24`);
  });

  it('has a gap where there is no value', () => {
    expect(linePath([1, 2, 3, 4], [1, null, 2, 2])).toBe(`M0 46M${(WIDTH * 2) / 3} 2L${WIDTH} 2`);
    expect(linePath([1, 2], [null, null])).toBe('');
    expect(linePath([], [])).toBe('');
  });

  it('of one step or of one value is level', () => {
    expect(linePath([7], [3])).toBe(`M0 46H${WIDTH}`);
    expect(linePath([1, 2], [3, 3])).toBe(`M0 46L${WIDTH} 46`);
  });
});

describe('bars', () => {
  it('are as high as their counts, and left out where there are none', () => {
    expect(barsPath([1, 0, 2])).toBe(`M0 ${HEIGHT}v-24h72V${HEIGHT}zM160 ${HEIGHT}v-48h72V${HEIGHT}z`);
    expect(barsPath([0, 0])).toBe('');
    expect(barsPath([])).toBe('');
  });
});

describe('the view of sessions', () => {
  beforeAll(async () => {
    stubBrowser();
    await import('../src/App.svelte'); // the first time takes seconds
  }, 60_000);

  beforeEach(stubBrowser);

  afterEach(() => {
    closePage();
    vi.unstubAllGlobals();
  });

  const session = { name: 's1', state: 'open', client_connected: true, created_at: 1, pid: 1, operations: 3, persist: false, user: 'ada', shared: {} };

  async function open(answer: SessionTensors | null, status = 200): Promise<string[]> {
    const asked: string[] = [];
    vi.stubGlobal('fetch', async (url: URL) => {
      if (!url.pathname.endsWith('/tensors')) return await new Promise(() => undefined);
      asked.push(url.pathname);
      return new Response(JSON.stringify(answer ?? { error: { code: 'wrong_state', message: 'of an older Loom' } }), { status });
    });
    await openPage('#/sessions/s1', snapshot({ sessions: [session] }), 'view');
    await new Promise((resolve) => setTimeout(resolve, 0));
    flushSync();
    return asked;
  }

  const items = (): HTMLElement[] => [...find('watched')!.querySelectorAll<HTMLElement>('[data-name]')];

  it('shows norms and histograms of weight and gradient', async () => {
    const asked = await open({ tensors: [tensor('net.0.weight')], left_out: 0 });
    expect(asked[0]).toMatch(/\/api\/v1\/sessions\/s1\/tensors$/);
    const [item] = items();
    const text = item!.textContent.replaceAll(/\s+/g, ' ');
    expect(text).toContain('weight norm 1.5');
    expect(text).toContain('gradient norm 0.125');
    expect(text).toContain('3 gradients');
    expect(text).toContain('gradient from -1 to 2, mean 0.25, std 0.5');
    const labels = [...item!.querySelectorAll('svg')].map((one) => one.getAttribute('aria-label'));
    expect(labels).toHaveLength(4);
    expect(labels[0]).toContain('norm of the weight from gradient 1 to 3');
    expect(labels[3]).toContain('histogram of the gradient');
    expect(find('watched-search')).toBeNull();
    expect(find('watched-left-out')).toBeNull();
  });

  it('shows nothing where nothing is watched, and where the driver is older', async () => {
    await open({ tensors: [], left_out: 0 });
    expect(find('watched')).toBeNull();
    closePage();
    await open(null, 409);
    expect(find('watched')).toBeNull();
    expect(document.body.textContent).not.toContain('older Loom');
  });

  it('says what is not finite, what failed, and how many are left out', async () => {
    const gone = tensor('w', { weight: values({ nonfinite: 0.5, norm: null, min: null, max: null }) });
    const failed = tensor('v', { trouble: HOSTILE, weight: null, grad: null, time: null, steps: [] });
    await open({ tensors: [gone, failed], left_out: 3 });
    expect(items().map((one) => one.dataset['name'])).toEqual(['v', 'w']);
    expect(items()[0]!.textContent).toContain(HOSTILE);
    expect(items()[1]!.textContent).toContain('50.0 % not finite');
    expect(find('watched-left-out')!.textContent).toContain('3 other tensors');
  });

  it('shows hostile names as text, and the mesh if there are several', async () => {
    await open({ tensors: [tensor(HOSTILE), tensor('w', { mesh: HOSTILE })], left_out: 0 });
    expect(items()[0]!.textContent).toContain(HOSTILE);
    expect(items()[1]!.textContent).toContain(HOSTILE);
    expect(document.querySelector('img')).toBeNull();
  });

  it('shows two of the same name', async () => {
    await open({ tensors: [tensor('w', { gradients: 1 }), tensor('w', { gradients: 2 })], left_out: 0 });
    expect(items().map((one) => one.dataset['name'])).toEqual(['w', 'w']);
  });

  it('searches among many', async () => {
    await open({ tensors: Array.from({ length: 9 }, (_, at) => tensor(`layer${at}`)), left_out: 0 });
    const search = find('watched-search') as HTMLInputElement;
    search.value = 'layer7';
    search.dispatchEvent(new Event('input', { bubbles: true }));
    flushSync();
    expect(items().map((one) => one.dataset['name'])).toEqual(['layer7']);
    search.value = 'x';
    search.dispatchEvent(new Event('input', { bubbles: true }));
    flushSync();
    expect(items()).toHaveLength(0);
    expect(find('watched')!.textContent).toContain('No name has this in it');
  });
});
