import { flushSync } from 'svelte';
import { describe, expect, it } from 'vitest';

import { labelTables } from '../src/lib/cards';
import { bestOf, differenceOf, laterChanges, linesOfRun, rowsOf, styleOf, valueAt } from '../src/lib/compare';
import { labelsOf } from '../src/lib/runvalues';
import type { CurveSection, RunDetails } from '../src/lib/types';
import { run } from './objects';

const section = (step: number[], value: (number | null)[], time = step): CurveSection => ({ time, step, value, low: value, high: value });
const details = (given: Partial<RunDetails> = {}): RunDetails => ({
  ...run('sft', { id: '0123456789', began: 100 }),
  start: {},
  metrics: [],
  members: [],
  timeline: [],
  children: [],
  marks_left_out: 0,
  ...given,
});

describe('runs that are compared', () => {
  it('have the value of a step, or of the last one before it; of a step that was made again the later one', () => {
    const lines = linesOfRun(details(), [section([0, 10, 20], [5, 4, 3]), section([15, 25], [9, 8])], 'step');
    expect([0, 9, 10, 14, 20, 25, 99].map((step) => valueAt(lines, step))).toEqual([5, 5, 4, 4, 9, 8, 8]);
    expect(valueAt(lines, -1)).toBeNull();
    expect(valueAt(linesOfRun(details(), [section([0, 1], [1, null])], 'step'), 1)).toBeNull();
    expect(valueAt([], 1)).toBeNull();
  });

  it('have the seconds since each began as an axis', () => {
    const [line] = linesOfRun(details(), [section([0, 1], [5, 4], [103, 105])], 'elapsed');
    expect([...line!.x]).toEqual([3, 5]);
    expect(line!.replica).toBe('0123456789');
  });

  it('have names that tell them apart', () => {
    const ids = ['fit-0.2-a', 'fit-0.2-b', 'x'].map((id) => ({ name: id === 'x' ? 'other' : 'fit', id }));
    expect(labelsOf(ids)).toEqual(['fit fit-0.2-a', 'fit fit-0.2-b', 'other']);
    expect(labelsOf([{ name: 'fit', id: '1234567' }, { name: 'fit', id: '7654321' }])).toEqual(['fit 123456', 'fit 765432']);
  });

  it('have each a colour and dashes of their own', () => {
    const styles = [...Array(8).keys()].map((at) => styleOf(at));
    expect(new Set(styles.map((one) => one.colour)).size).toBe(8);
    expect(new Set(styles.map((one) => one.dashes.join())).size).toBe(8);
  });

  it('have the keys that differ, also of nested objects, and those that only some have', () => {
    const rows = rowsOf([
      { lr: 0.1, versions: { torch: '2.1' }, gpus: ['a'], same: null },
      { lr: 0.2, versions: { torch: '2.1', loom: '1' }, gpus: ['a'], same: null },
    ]);
    expect(rows.map(({ key, differs }) => [key, differs])).toEqual([['gpus', false], ['lr', true], ['same', false], ['versions.loom', true], ['versions.torch', false]]);
    expect(rows.find((one) => one.key === 'versions.loom')!.values).toEqual([undefined, '1']);
    expect(rowsOf([])).toEqual([]);
  });

  it('have the last change of each key while they ran', () => {
    const mark = (step: number, value: number) => ({ kind: 'command', time: 1, event: step, step, changes: { lr: { old: 1, new: value } } });
    expect([...laterChanges(details({ timeline: [{ kind: 'started', time: 0, event: 0, step: 0 }, mark(5, 0.5), mark(9, 0.25)] }))]).toEqual([['lr', { value: 0.25, step: 9 }]]);
  });

  it.each([
    [1.1, 1, '+0.1 (+10 %)'],
    [0.5, 1, '−0.5 (−50 %)'],
    [1, 1, '±0'],
    [1, 0, '+1'],
    [NaN, 1, ''],
    [1, null, ''],
    [-3, -2, '−1 (−50 %)'],
    [1.00001, 1, '+1.00e-5 (+0.0 %)'],
    [5000, 1, '+5000'],
  ])('%d beside %d is %s', (value, base, text) => {
    expect(differenceOf(value, base)).toBe(text);
  });

  it('have a best value, if it is known which is better', () => {
    expect(bestOf([3, 1, NaN, null], 'less')).toBe(1);
    expect(bestOf([3, 1, NaN, null], 'more')).toBe(0);
    for (const values of [[1], [1, null], [2, 2], []]) expect(bestOf(values, 'less')).toBe(-1);
    expect(bestOf([3, 1], null)).toBe(-1);
  });
});

describe('tables as cards', () => {
  it('have the title of the column in each cell, and say that they are tables', () => {
    const root = document.createElement('main');
    root.innerHTML = `<table><thead><tr><th>key ↑</th><th colspan="2">value</th><th><span class="hidden">to do</span></th></tr></thead>
      <tbody><tr><td>a</td><td>1</td><td>2</td><td>x</td></tr><tr><td colspan="3">wide</td><td>y</td></tr></tbody></table>`;
    const stop = labelTables(root);
    flushSync();
    const labels = [...root.querySelectorAll('td')].map((one) => one.dataset['label']);
    expect(labels).toEqual(['key', 'value', 'value', '', 'key', '']);
    expect(root.querySelector('table')!.getAttribute('role')).toBe('table');
    expect(root.querySelectorAll('[role="cell"]')).toHaveLength(6);
    stop();
  });
});
