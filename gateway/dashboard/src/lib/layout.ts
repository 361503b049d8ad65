/** The places of cells in the grid of replicas. */

const SIZES = [30, 26, 22, 18, 15, 12, 10, 8, 7, 6, 5];
const MOST_LABELS = 12;
export const LABEL_HEIGHT = 24;

export interface Block {
  label: string;
  from: number;
  to: number;
  top: number;
}

export interface Layout {
  cell: number;
  columns: number;
  height: number;
  blocks: Block[];
  labelled: boolean;
}

/** Arrange cells, which are ordered by group, in blocks with labels; the largest cells that fit are taken. */
export function arrange(groups: readonly string[], width: number, height: number): Layout {
  const parts: { label: string; from: number; to: number }[] = [];
  groups.forEach((label, at) => {
    const last = parts.at(-1);
    if (last && last.label === label) last.to = at + 1;
    else parts.push({ label, from: at, to: at + 1 });
  });
  const labelled = parts.length <= MOST_LABELS;
  const blocks = labelled ? parts : [{ label: '', from: 0, to: groups.length }];
  let found: Layout | null = null;
  for (const cell of SIZES) {
    found = place(blocks, cell, width, labelled);
    if (found.height <= height) break;
  }
  return found!;
}

function place(blocks: Omit<Block, 'top'>[], cell: number, width: number, labelled: boolean): Layout {
  const columns = Math.max(1, Math.floor(width / cell));
  let top = 0;
  const placed = blocks.map((one) => {
    top += labelled ? LABEL_HEIGHT : 0;
    const block = { ...one, top };
    top += Math.ceil((one.to - one.from) / columns) * cell + (labelled ? 8 : 0);
    return block;
  });
  return { cell, columns, height: Math.max(top, cell), blocks: placed, labelled };
}

/** The pixels between two cells. */
export function gapOf(cell: number): number {
  return cell > 12 ? 3 : cell > 7 ? 2 : 1;
}

/** Where a block ends. */
export function endOf({ cell, columns }: Layout, { from, to, top }: Block): number {
  return top + Math.ceil((to - from) / columns) * cell;
}

export function placeOf(layout: Layout, index: number): { x: number; y: number } {
  const block = layout.blocks.find((one) => index < one.to) ?? layout.blocks.at(-1)!;
  const at = index - block.from;
  return {
    x: (at % layout.columns) * layout.cell,
    y: block.top + Math.floor(at / layout.columns) * layout.cell,
  };
}

/** Return the index of the cell at a point; -1 if there is none. */
export function cellAt(layout: Layout, x: number, y: number): number {
  const column = Math.floor(x / layout.cell);
  if (column < 0 || column >= layout.columns) return -1;
  for (const block of layout.blocks) {
    if (y < block.top) return -1;
    const index = block.from + Math.floor((y - block.top) / layout.cell) * layout.columns + column;
    if (index < block.to) return index;
  }
  return -1;
}

/** Return the indices of the cells that a rectangle touches. */
export function cellsIn(layout: Layout, x0: number, y0: number, x1: number, y1: number): number[] {
  const [left, right] = [Math.min(x0, x1), Math.max(x0, x1)];
  const [top, bottom] = [Math.min(y0, y1), Math.max(y0, y1)];
  const found: number[] = [];
  for (const block of layout.blocks) {
    const rows = Math.ceil((block.to - block.from) / layout.columns);
    const first = Math.max(0, Math.floor((top - block.top) / layout.cell));
    const last = Math.min(rows - 1, Math.floor((bottom - block.top) / layout.cell));
    const from = Math.max(0, Math.floor(left / layout.cell));
    const to = Math.min(layout.columns - 1, Math.floor(right / layout.cell));
    for (let row = first; row <= last; row += 1)
      for (let column = from; column <= to; column += 1) {
        const index = block.from + row * layout.columns + column;
        if (index < block.to) found.push(index);
      }
  }
  return found;
}
