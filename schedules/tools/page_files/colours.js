// Colours and textures. Kinds differ in lightness too, chunks and causes in texture alone, so that
// everything can be told apart without colour and on paper.

const dark = matchMedia("(prefers-color-scheme: dark)");
let asked = null; // by the page around this one: dark or not
const isDark = () => (asked ?? dark.matches) && !document.documentElement.classList.contains("printing");
let theme = null; // of the moment; null when it has to be read again
const textures = new Map();

function currentTheme() {
  if (theme) return theme;
  textures.clear();
  document.documentElement.classList.toggle("dark", isDark());
  const style = getComputedStyle(document.documentElement);
  const own = (name) => style.getPropertyValue(`--${name}`).trim();
  theme = { ...DATA.themes[isDark() ? "dark" : "light"] };
  for (const name of ["paper", "text", "muted", "rule", "accent", "raised"]) theme[name] = own(name);
  theme.font = getComputedStyle(document.body).fontFamily;
  return theme;
}

// Each draws one tile of side 1; tiles meet without a seam.
const STROKES = {
  up: (c) => line(c, [-0.25, 0.25, 0.25, -0.25], [-0.25, 1.25, 1.25, -0.25], [0.75, 1.25, 1.25, 0.75]),
  down: (c) => line(c, [0.75, -0.25, 1.25, 0.25], [-0.25, -0.25, 1.25, 1.25], [-0.25, 0.75, 0.25, 1.25]),
  level: (c) => line(c, [0, 0.25, 1, 0.25], [0, 0.75, 1, 0.75]),
  upright: (c) => line(c, [0.25, 0, 0.25, 1], [0.75, 0, 0.75, 1]),
  dots: (c) => [[0.25, 0.25], [0.75, 0.75]].forEach(([x, y]) => c.fillRect(x - 0.09, y - 0.09, 0.18, 0.18)),
  cross: (c) => {
    STROKES.up(c);
    STROKES.down(c);
  },
};
const CHUNK_STROKES = ["", "up", "dots", "cross"];
const CAUSE_STROKES = {
  fill: "up",
  drain: "down",
  imbalance: "dots",
  communication: "level",
  lockstep: "upright",
  "optimizer wait": "",
};

function line(context, ...segments) {
  context.beginPath();
  for (const [a, b, c, d] of segments) {
    context.moveTo(a, b);
    context.lineTo(c, d);
  }
  context.stroke();
}

/** A pattern for fillStyle, or null for none. */
function texture(context, stroke, colour, alpha, side = 9) {
  if (!stroke) return null;
  const key = `${stroke} ${colour} ${alpha} ${side} ${devicePixelRatio}`;
  if (!textures.has(key)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = Math.max(4, Math.round(side * devicePixelRatio));
    const brush = tile.getContext("2d");
    brush.scale(tile.width, tile.width);
    brush.lineWidth = 1.1 / side;
    brush.globalAlpha = alpha;
    brush.strokeStyle = brush.fillStyle = colour;
    STROKES[stroke](brush);
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(side / tile.width));
    textures.set(key, pattern);
  }
  return textures.get(key);
}
const chunkTexture = (context, kind, chunk) =>
  texture(context, CHUNK_STROKES[chunk % CHUNK_STROKES.length], currentTheme().ink[kind], 0.36, 8);
const causeTexture = (context, cause) =>
  texture(context, CAUSE_STROKES[cause], currentTheme().muted, 0.4);

/** Prepare a canvas for drawing in CSS pixels; crisp on every screen. */
function prepare(canvas, width, height) {
  const wanted = document.documentElement.classList.contains("printing") ? 3 : devicePixelRatio;
  const ratio = Math.min(wanted, 16000 / height); // browsers give no canvas higher than that
  const size = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== size[0]) canvas.width = size[0];
  if (canvas.height !== size[1]) canvas.height = size[1];
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
