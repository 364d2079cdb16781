// A timetable's frame follows the theme of the page around it and is as high as what it shows.
(() => {
  "use strict";
  const frames = () => document.querySelectorAll(".timetable iframe");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => {
    const asked = document.body.dataset.theme;
    return asked === "dark" || (asked !== "light" && system.matches);
  };
  const tell = (frame) => frame.contentWindow?.postMessage({ dark: dark() }, "*");

  addEventListener("message", ({ data, source }) => {
    for (const frame of frames()) {
      if (frame.contentWindow !== source || !Number.isFinite(data?.height)) continue;
      frame.style.height = `${Math.min(Math.max(data.height, 80), 4000)}px`;
      tell(frame); // its first message says that it listens
    }
  });
  addEventListener("DOMContentLoaded", () => {
    const tellAll = () => frames().forEach(tell);
    new MutationObserver(tellAll).observe(document.body, { attributeFilter: ["data-theme"] });
    system.addEventListener("change", tellAll);
  });
})();
