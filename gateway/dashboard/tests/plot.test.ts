/** What a plot says of curves whose values are never finite. */

import { flushSync, mount, unmount, type Component } from 'svelte';
import { describe, expect, it } from 'vitest';

import { linesOf } from '../src/lib/sections';
import { NO_POINTS, pointsOf, Series } from '../src/lib/series';
import { find, inBrowser } from './app';

inBrowser();

function shown<Props extends Record<string, unknown>>(component: Component<Props>, props: Props): { words: string | undefined; label: string } {
  const target = document.createElement('div');
  document.body.append(target);
  const made = mount(component, { target, props });
  flushSync();
  const found = { words: find('nothing-finite')?.textContent, label: target.querySelector('[role="img"]')!.getAttribute('aria-label')! };
  void unmount(made);
  target.remove();
  return found;
}

const NONE = 'no finite value in 1,000 points';

describe('a metric that is never finite', () => {
  const steps = Array.from({ length: 1000 }, (_, at) => at);

  async function plotted(values: (number | null)[], spread: (number | null)[] = values) {
    const { default: Plot } = await import('../src/components/Plot.svelte');
    const lines = linesOf(null, [{ time: steps, step: steps, value: values, low: spread, high: spread }], 'step', null, 0);
    return shown(Plot, { label: 'grad/norm', lines, axis: 'step' as const, onzoom: () => undefined });
  }

  it('is said in words by the curve of a run, and by no other', async () => {
    const odd: (number | null)[] = steps.map(() => null);
    expect(await plotted(odd)).toEqual({ words: NONE, label: `grad/norm by step; ${NONE}, with 0 marks` });
    expect((await plotted(odd.with(3, 7))).words).toBeUndefined();
    expect((await plotted(odd, odd.with(3, 7))).words).toBeUndefined(); // some ranks had a value
  });

  it('is said in words by the curve of a replica, from its history or live', async () => {
    const { default: Curve } = await import('../src/components/Curve.svelte');
    const history = pointsOf(steps.map((at) => [at, NaN]));
    const live = new Series(100);
    for (const at of steps) live.push(at, Infinity);
    const curve = (points = NO_POINTS, later = NO_POINTS) => shown(Curve, { label: 'grad/norm', points, later });
    expect([curve(history), curve(NO_POINTS, live.points), curve(history, live.points)].map((one) => one.words)).toEqual([NONE, NONE, NONE]);
    expect(curve(history).label).toContain(`by time; ${NONE}, with 0 marks`);
    live.push(1000, 1);
    expect(curve(history, live.points).words).toBeUndefined();
    expect(curve().words).toBeUndefined(); // there is no point yet
    expect(curve(pointsOf([[1, NaN]])).words).toBe('no finite value in 1 point');
  });
});
