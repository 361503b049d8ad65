/** The whole page in jsdom, with a store that tests fill. */

import { flushSync, mount, unmount } from 'svelte';
import { afterEach, beforeEach, vi } from 'vitest';

import type { Incoming, Scope } from '../src/lib/types';

let app: Record<string, unknown> | null = null;
let flush = (): void => undefined;

export class NoObserver {
  observe(): void {}
  unobserve(): void {}
  disconnect(): void {}
}

/** What jsdom lacks and the page uses, and requests that nobody answers. */
export function stubBrowser(): void {
  vi.stubGlobal('matchMedia', () => ({ matches: false, addEventListener: () => undefined, removeEventListener: () => undefined }));
  vi.stubGlobal('ResizeObserver', NoObserver);
  vi.stubGlobal('IntersectionObserver', NoObserver);
  vi.stubGlobal('fetch', () => new Promise(() => undefined));
}

/** Give each test of a file, or of a group, a browser of its own. */
export function inBrowser(): void {
  beforeEach(stubBrowser);
  afterEach(() => {
    closePage();
    vi.unstubAllGlobals();
  });
}

/** Show the page at an address, as if the gateway had sent a message. */
export async function openPage(hash: string, message: Incoming, scope: Scope): Promise<HTMLElement> {
  location.hash = hash;
  const { store } = await import('../src/lib/page');
  const { default: App } = await import('../src/App.svelte');
  store.identity = { user: 'ada', name: 'ada', scope, expires: null };
  store.signedIn = true;
  store.link = { state: 'open', since: Date.now(), reason: '' };
  store.handleWebSocketMessage(message);
  flush = () => store.flush();
  flush();
  window.dispatchEvent(new HashChangeEvent('hashchange'));
  const target = document.createElement('div');
  document.body.append(target);
  app = mount(App, { target });
  flushSync();
  return target;
}

/** Take the page away, and let no timer of its store outlive the browser. */
export function closePage(): void {
  flush();
  if (app) void unmount(app);
  app = null;
  document.body.replaceChildren();
}

export const find = (id: string): HTMLElement | null => document.querySelector(`[data-testid="${id}"]`);
