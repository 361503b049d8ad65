/**
 * Binary frames: columns of values of replicas, as typed arrays over the frame's own memory.
 *
 * A section has the values of one column, either of the replicas that it numbers or of the numbers 0, 1, 2, ….
 * Frames are little-endian, as is every machine that runs a browser.
 */

export const COLUMNS = ['state', 'step', 'loss', 'pace'] as const;

export type Column = (typeof COLUMNS)[number];

/** A value of `step`, and the bits of a value of `loss` or `pace`, that is not known. */
export const NONE = 0xffff_ffff;
/** The bit of a state that says that the replica is not connected. */
export const NOT_CONNECTED = 0x80;
/** The state of a number that no replica has. */
export const NO_REPLICA = 0x7f;

const KIND = 1;
const VERSION = 1;
const HEADER = 8; // bytes, of a frame and of a section
const TYPES: Record<Column, number> = { state: 0, step: 1, loss: 2, pace: 2 };
const DENSE = 1;

export interface Section {
  column: Column;
  /** The numbers of the values' replicas; null: they are 0, 1, 2, …. */
  numbers: Uint32Array | null;
  /** States as bytes, steps as numbers, losses and paces as the bits of 32-bit floats. */
  values: Uint8Array | Uint32Array;
}

export class FrameError extends Error {}

/** Return the sections of a frame. Raise `FrameError` if it is cut off or makes no sense. */
export function readFrame(frame: ArrayBuffer): Section[] {
  if (frame.byteLength < HEADER) throw new FrameError(`A frame has at least ${HEADER} bytes, and this one ${frame.byteLength}.`);
  const view = new DataView(frame);
  if (view.getUint8(0) !== KIND || view.getUint8(1) !== VERSION)
    throw new FrameError(`A frame of kind ${view.getUint8(0)} and version ${view.getUint8(1)} is not known.`);
  const sections: Section[] = [];
  let at = HEADER;
  for (let left = view.getUint16(2, true); left > 0; left -= 1) {
    if (at + HEADER > frame.byteLength) throw new FrameError('The frame ends before its last section.');
    const column = COLUMNS[view.getUint8(at)];
    const layout = view.getUint8(at + 2);
    if (column === undefined || view.getUint8(at + 1) !== TYPES[column] || layout > DENSE)
      throw new FrameError(`A section of column ${view.getUint8(at)}, type ${view.getUint8(at + 1)} and layout ${layout} is not known.`);
    const count = view.getUint32(at + 4, true);
    const size = column === 'state' ? 1 : 4;
    const numbered = layout === DENSE ? 0 : count * 4;
    at += HEADER;
    if (at + numbered + count * size > frame.byteLength) throw new FrameError(`The frame ends within its values of ${column}.`);
    const numbers = layout === DENSE ? null : new Uint32Array(frame, at, count);
    at += numbered;
    sections.push({ column, numbers, values: size === 1 ? new Uint8Array(frame, at, count) : new Uint32Array(frame, at, count) });
    at += Math.ceil((count * size) / 4) * 4;
  }
  if (at !== frame.byteLength) throw new FrameError(`The frame has ${frame.byteLength - at} bytes after its last section.`);
  return sections;
}
