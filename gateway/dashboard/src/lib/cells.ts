/** Cells as pixels: of thousands of small squares those that have changed are written faster than a canvas draws them. */

import { placeOf, type Layout } from './layout';

export class CellPixels {
  readonly width: number;
  readonly height: number;
  #image: ImageData | null = null;
  /** The pixels as bytes of red, green, blue and alpha. */
  readonly bytes: Uint8ClampedArray<ArrayBuffer>;
  #words: Uint32Array;
  #offsets: Uint32Array; // of each cell's first pixel
  #size: number;

  /**
   * @param layout the places of the cells
   * @param cells their number
   * @param wide the width of the grid in CSS pixels
   * @param size the edge of a cell in CSS pixels, without the gap
   * @param ratio the device's pixels for each of them
   */
  constructor(layout: Layout, cells: number, wide: number, size: number, ratio: number) {
    this.width = Math.round(wide * ratio);
    this.height = Math.round(layout.height * ratio);
    this.bytes = new Uint8ClampedArray(this.width * this.height * 4);
    this.#words = new Uint32Array(this.bytes.buffer);
    this.#size = Math.max(1, Math.round(size * ratio));
    this.#offsets = new Uint32Array(cells);
    for (let at = 0; at < cells; at += 1) {
      const { x, y } = placeOf(layout, at);
      this.#offsets[at] = Math.round(y * ratio) * this.width + Math.round(x * ratio);
    }
  }

  /** The pixels as an image: always the same one, which has them as they are now. */
  get image(): ImageData {
    return (this.#image ??= new ImageData(this.bytes, this.width, this.height));
  }

  /**
   * Write the cells whose bin has changed; return the first row of pixels that is another, and the one after the last; null if none is.
   *
   * @param before the bins that were written; null to write all
   * @param colours a word of each bin, of `wordOf`
   */
  paint(bins: Uint8Array, before: Uint8Array | null, colours: Uint32Array): [number, number] | null {
    const words = this.#words;
    const [wide, size] = [this.width, this.#size];
    let [first, last] = [Infinity, -1];
    for (let at = 0; at < bins.length; at += 1) {
      if (before !== null && before[at] === bins[at]) continue;
      const colour = colours[bins[at]!]!;
      const begin = this.#offsets[at]!;
      if (begin < first) first = begin;
      if (begin > last) last = begin;
      // For so few words a loop is much faster than `fill`.
      for (let row = begin, end = begin + size * wide; row < end; row += wide)
        for (let pixel = row; pixel < row + size; pixel += 1) words[pixel] = colour;
    }
    return last < 0 ? null : [Math.floor(first / wide), Math.min(this.height, Math.floor(last / wide) + size)];
  }
}

/** Return a pixel of a colour as a word, as browsers' machines have it: little-endian. */
export function wordOf([red = 0, green = 0, blue = 0]: readonly number[]): number {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}
