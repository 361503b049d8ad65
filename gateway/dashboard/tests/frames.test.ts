import { describe, expect, it } from 'vitest';

import { FrameError, NONE, readFrame } from '../src/lib/store/frames';
import { bitsOf, frame } from './objects';

const EXAMPLE = frame(
  { column: 'state', numbers: [3, 70_000], values: [1, 0x86] },
  { column: 'step', values: [10, null, 4_294_967_294] },
  { column: 'loss', numbers: [5], values: [NaN] },
  { column: 'pace', values: [0.25, null] },
);

describe('a frame', () => {
  it('has columns, dense ones and those of single replicas', () => {
    const read = readFrame(EXAMPLE).map(({ column, numbers, values }) => [column, numbers && [...numbers], [...values]]);
    expect(read).toEqual([
      ['state', [3, 70_000], [1, 0x86]],
      ['step', null, [10, NONE, 4_294_967_294]],
      ['loss', [5], [bitsOf(NaN)]],
      ['pace', null, [bitsOf(0.25), NONE]],
    ]);
  });

  it('is read without a copy', () => {
    for (const { numbers, values } of readFrame(EXAMPLE)) {
      expect(values.buffer).toBe(EXAMPLE);
      if (numbers) expect(numbers.buffer).toBe(EXAMPLE);
    }
  });

  it('may have no section, and sections without values', () => {
    expect(readFrame(frame())).toEqual([]);
    expect(readFrame(frame({ column: 'loss', numbers: [], values: [] }))[0]!.values).toHaveLength(0);
  });

  it('that is cut off anywhere is an error', () => {
    for (let length = 0; length < EXAMPLE.byteLength; length += 1) expect(() => readFrame(EXAMPLE.slice(0, length)), String(length)).toThrow(FrameError);
  });

  it('with bytes after its end is an error', () => {
    const longer = new Uint8Array(EXAMPLE.byteLength + 4);
    longer.set(new Uint8Array(EXAMPLE));
    expect(() => readFrame(longer.buffer)).toThrow('4 bytes after');
  });

  it.each([
    ['another kind', 0, 2],
    ['another version', 1, 2],
    ['more sections than it has', 2, 9],
    ['an unknown column', 8, 4],
    ['another type of a column', 9, 2],
    ['an unknown layout', 10, 2],
    ['too many values', 15, 0xff],
  ])('with %s is an error', (_, at, byte) => {
    const wrong = new Uint8Array(EXAMPLE.slice(0));
    wrong[at] = byte;
    expect(() => readFrame(wrong.buffer)).toThrow(FrameError);
  });

  it('of any bytes is read or is an error, and nothing else', () => {
    let seed = 1;
    const next = (): number => (seed = (seed * 48_271) % 2_147_483_647);
    for (let round = 0; round < 3000; round += 1) {
      const bytes = new Uint8Array(EXAMPLE.slice(0, round % 3 ? EXAMPLE.byteLength : next() % EXAMPLE.byteLength));
      for (let change = 0; change < 1 + (round % 5); change += 1) if (bytes.length) bytes[next() % bytes.length] = next() % 256;
      try {
        readFrame(bytes.buffer);
      } catch (error) {
        expect(error).toBeInstanceOf(FrameError);
      }
    }
  });
});
