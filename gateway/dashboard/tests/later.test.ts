/** Views that are loaded when they are opened first, and what is said of one that cannot be. */

import { afterEach, describe, expect, it, vi } from 'vitest';

import { stubBrowser } from './app';


afterEach(() => {
  vi.doUnmock('../src/views/Chaos.svelte');
  vi.unstubAllGlobals();
});

describe('a view that is loaded later', () => {
  it('says that it could not be loaded, and offers to load the page again', async () => {
    stubBrowser();
    vi.resetModules();
    const { flushSync, mount, unmount } = await import('svelte');
    vi.doMock('../src/views/Chaos.svelte', () => {
      throw new Error('404');
    });
    const { default: LaterView } = await import('../src/components/LaterView.svelte');
    const shown = mount(LaterView, { target: document.body, props: { view: 'chaos', parts: [] } });

    await vi.waitFor(() => {
      flushSync();
      expect(document.querySelector('[data-testid="not-loaded"]')?.textContent).toContain('could not be loaded');
    });
    expect(document.querySelector('[data-testid="not-loaded"] button')).not.toBeNull();
    await unmount(shown);
  });

  it('is there at once after the others were loaded', async () => {
    vi.resetModules();
    const { loadedView, loadViews, nameOfView } = await import('../src/lib/later');
    expect(loadedView('devices')).toBeNull();
    await loadViews();
    expect(loadedView('devices')).not.toBeNull();
    expect([nameOfView('replicas', true), nameOfView('replicas', false), nameOfView('compare', true)]).toEqual(['replica', 'replicas', 'compare']);
  });
});
