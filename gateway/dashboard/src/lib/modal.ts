/** Show a dialog, with the page behind it shut off, as long as it is there. */
export function modal(dialog: HTMLDialogElement): () => void {
  dialog.showModal();
  return () => dialog.close();
}
