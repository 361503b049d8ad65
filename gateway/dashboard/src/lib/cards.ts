/** Tables as cards on a phone: each cell gets its column's title as a label, which `app.css` shows. */

const ROLES: Record<string, string> = { THEAD: 'rowgroup', TBODY: 'rowgroup', TR: 'row', TH: 'columnheader', TD: 'cell' };

/** Label the cells of all tables, also of rows that come later, until the returned function is called. */
export function labelTables(root: HTMLElement): () => void {
  let due = 0;
  const label = (): void => {
    due = 0;
    for (const table of root.querySelectorAll('table')) labelCells(table);
  };
  const observer = new MutationObserver(() => (due ||= requestAnimationFrame(label)));
  observer.observe(root, { childList: true, subtree: true });
  label();
  return () => {
    observer.disconnect();
    cancelAnimationFrame(due);
  };
}

function labelCells(table: HTMLTableElement): void {
  const titles: string[] = [];
  for (const head of table.tHead?.rows[0]?.cells ?? [])
    for (let span = head.colSpan; span > 0; span -= 1) titles.push(head.querySelector('.hidden') ? '' : head.textContent.replace(/[↑↓]/g, '').trim());
  if (!titles.length) return;
  // Cells that are laid out as a grid are no table for a screen reader any more, unless they say so.
  if (!table.hasAttribute('role')) table.setAttribute('role', 'table');
  for (const part of table.querySelectorAll('thead, tbody, tr, th, td')) if (!part.hasAttribute('role')) part.setAttribute('role', ROLES[part.tagName]!);
  for (const body of table.tBodies)
    for (const row of body.rows) {
      let at = 0;
      for (const cell of row.cells) {
        if (!cell.hasAttribute('data-label')) cell.setAttribute('data-label', titles[at] ?? '');
        at += cell.colSpan;
      }
    }
}
