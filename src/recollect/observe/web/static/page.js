// What every page has: the theme, live events, and numbers that people can read.
"use strict";

(function () {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  const apply = () => {
    root.dataset.theme = chosen() || (dark.matches ? "dark" : "light");
    window.dispatchEvent(new Event("themechange"));
  };
  apply(); // before the first paint
  dark.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      try { localStorage.setItem("theme", root.dataset.theme === "dark" ? "light" : "dark"); } catch { /* this visit only */ }
      apply();
    });
  });
})();

// Call onMessage for each message of a stream; says on the page when the other side is gone. Reconnects by itself.
function live(address, onMessage) {
  const source = new EventSource(address);
  const status = document.getElementById("status");
  source.onmessage = (event) => { status.textContent = ""; onMessage(JSON.parse(event.data), source); };
  source.onerror = () => { status.textContent = "not connected"; };
  return source;
}

// Six characters or so: 1234567 -> 1.23M, 0.00012 -> 1.2e-4.
function shortNumber(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  const size = Math.abs(x);
  if (size >= 1e9) return (x / 1e9).toFixed(2) + "G";
  if (size >= 1e6) return (x / 1e6).toFixed(2) + "M";
  if (size >= 1e4) return Math.round(x).toLocaleString("en-US");
  if (Number.isInteger(x)) return String(x);
  if (size >= 100) return x.toFixed(1);
  if (size >= 0.0001) return String(Number(x.toPrecision(3)));
  return x.toExponential(1);
}

function shortTime(seconds) {
  const s = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  return s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
}

// element("td", {class: "number"}, "3"): children are text or elements, never HTML.
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
