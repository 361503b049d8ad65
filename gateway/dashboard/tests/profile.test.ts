import { describe, expect, it } from 'vitest';

import { colourOf, functionName, functionTimes, layOut, readFolded } from '../src/lib/profile';

const FOLDED = 'main (a.py:1);train (b.py:5);step (b.py:9) 6\nmain (a.py:1);train (b.py:5) 2\nmain (a.py:1);save (c.py:3) 2\nno samples\n x 0\n';

describe('a profile', () => {
  it('is a tree, with what takes longest first', () => {
    const root = readFolded(FOLDED);
    expect(root.samples).toBe(10);
    expect(root.calls.map((one) => [one.name, one.samples])).toEqual([['main (a.py:1)', 10]]);
    expect(root.calls[0]!.calls.map((one) => [functionName(one.name), one.samples])).toEqual([
      ['train', 8],
      ['save', 2],
    ]);
    expect(readFolded('').samples).toBe(0);
  });

  it('is laid out by shares of the width', () => {
    const boxes = layOut(readFolded(FOLDED), []);
    const of = (name: string) => boxes.find((one) => functionName(one.call.name) === name)!;
    expect([of('all').left, of('all').width, of('all').depth]).toEqual([0, 1, 0]);
    expect([of('train').left, of('train').width, of('train').depth]).toEqual([0, 0.8, 2]);
    expect(of('save').left).toBeCloseTo(0.8);
    expect(of('step').width).toBeCloseTo(0.6);
  });

  it('is zoomed to a function, whose callers stay', () => {
    const root = readFolded(FOLDED);
    const train = layOut(root, []).find((one) => functionName(one.call.name) === 'train')!;
    const boxes = layOut(root, train.path);
    expect(boxes.map((one) => [functionName(one.call.name), one.width])).toEqual([
      ['all', 1],
      ['main', 1],
      ['train', 1],
      ['step', 0.75],
    ]);
  });

  it('leaves out what is too narrow to be seen', () => {
    const boxes = layOut(readFolded('a;wide 10000\na;narrow 1\n'), []);
    expect(boxes.map((one) => one.call.name)).toEqual(['all', 'a', 'wide']);
  });

  it('has a list of functions, in which a recursive one counts once', () => {
    const times = functionTimes('main;fib;fib 4\nmain 1\n');
    expect(times).toEqual([
      { name: 'main', total: 5, own: 1 },
      { name: 'fib', total: 4, own: 4 },
    ]);
  });

  it('has one colour for each file', () => {
    expect(colourOf('a (x.py:1)', 4)).toBe(colourOf('b (x.py:200)', 4));
    expect(functionName('<lambda> (<string>:1)')).toBe('<lambda>');
    expect(functionName('C::run')).toBe('C::run');
  });
});
