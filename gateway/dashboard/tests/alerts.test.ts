import { flushSync } from 'svelte';
import { describe, expect, it, vi } from 'vitest';

import { describeEvent } from '../src/lib/events';
import type { WeaverEvent } from '../src/lib/types';
import { find, inBrowser, openPage } from './app';
import { event, snapshot } from './objects';

inBrowser();

const alerted = (id: number, more: Record<string, unknown> = {}): WeaverEvent =>
  event(id, 'alerted', null, { alert: `a${id}`, rule: 'not_a_number', run: 'abc', message: `loss is <b>nan</b> ${id}`, ...more });

async function tell(...events: WeaverEvent[]): Promise<void> {
  const { store } = await import('../src/lib/page');
  for (const one of events) store.handleWebSocketMessage({ type: 'event', event: one });
  store.flush();
  flushSync();
}

const shown = (): string[] => [...document.querySelectorAll('[data-testid="alerts"] [role="alert"] span')].map((one) => one.textContent ?? '');

/** Notifications of a browser that answers a question for them with `granted`. */
function notifications(): { asked: number; shown: string[] } {
  const seen = { asked: 0, shown: [] as string[] };
  class Shown {
    static permission = 'default';
    static requestPermission(): Promise<string> {
      seen.asked += 1;
      return Promise.resolve('granted');
    }
    onclick: (() => void) | null = null;
    constructor(title: string, options: { body: string }) {
      seen.shown.push(`${title}: ${options.body}`);
    }
  }
  vi.stubGlobal('Notification', Shown);
  vi.stubGlobal('isSecureContext', true);
  return seen;
}

describe('alerts', () => {
  it('are described in the log', () => {
    expect(describeEvent(alerted(1))).toMatchObject({ tone: 'warning' });
    expect(describeEvent(alerted(1)).text).toContain('not a number');
  });

  it('that come while the page is open are shown until they are dismissed, and older ones are not', async () => {
    await openPage('#/devices', snapshot({ events: [alerted(1)] }), 'view');
    expect(find('alerts')).toBeNull();

    await tell(alerted(2), alerted(3, { quiet: true }), alerted(4, { run: null }));
    expect(shown()).toEqual(['not a number: loss is <b>nan</b> 2', 'not a number: loss is <b>nan</b> 4']);
    expect([...document.querySelectorAll('[data-testid="alerts"] a')].map((one) => one.getAttribute('href'))).toEqual([
      '#/runs/abc',
      '#/overview',
    ]);

    document.querySelector<HTMLElement>('[data-testid="alerts"] button')!.click();
    flushSync();
    expect(shown()).toEqual(['not a number: loss is <b>nan</b> 4']);
  });

  it('are at most four at a time, and the others are counted', async () => {
    await openPage('#/devices', snapshot({}), 'view');
    await tell(...[11, 12, 13, 14, 15, 16].map((id) => alerted(id)));

    expect(shown()).toHaveLength(4);
    expect(find('alerts')!.textContent).toContain('2 earlier');
    expect(find('allow-notifications')).toBeNull(); // this browser has none
  });

  it('become notifications after a click, while the page is hidden', async () => {
    const seen = notifications();
    await openPage('#/devices', snapshot({}), 'view');
    await tell(alerted(21));
    expect(seen).toEqual({ asked: 0, shown: [] });

    find('allow-notifications')!.click();
    await Promise.resolve();
    await Promise.resolve();
    flushSync();
    expect(find('allow-notifications')).toBeNull();
    await tell(alerted(22));
    vi.spyOn(document, 'hidden', 'get').mockReturnValue(true);
    await tell(alerted(23), alerted(24, { quiet: true }));
    expect(seen).toEqual({ asked: 1, shown: ['Loom: not_a_number: loss is <b>nan</b> 23'] });
  });
});
