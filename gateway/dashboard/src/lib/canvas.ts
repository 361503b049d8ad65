/** Canvases that are as sharp as the screen. */

/** Give a canvas its size in pixels of the page, and return what draws on it in these, with nothing drawn if the size is another one. */
export function fit(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const [wide, high] = [width, height].map((one) => Math.round(one * devicePixelRatio)) as [number, number];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext('2d')!;
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  return context;
}
