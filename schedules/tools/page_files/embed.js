// In a frame of another page, as page.html#embedded: its theme, and a frame as high as the page.

function embed() {
  document.documentElement.classList.add("embedded");
  addEventListener("message", ({ data, source }) => {
    if (source !== parent || typeof data?.dark !== "boolean") return;
    asked = data.dark;
    restyle();
  });
  const tell = () => parent.postMessage({ height: Math.ceil(document.body.getBoundingClientRect().height) + 2 }, "*");
  new ResizeObserver(tell).observe(document.body);
}
if (parent !== window && location.hash === "#embedded") embed();
